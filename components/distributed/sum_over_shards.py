"""Sums over the ranks that hold different parameters, such as the squared gradient norm of the whole model."""

from torch import Tensor

from drawloom.components.ports.distributed import Mesh
from drawloom.graph import component

SPLITTING = ("pipeline",)
"""Mesh dimensions along which ranks hold different parameters."""


@component(impact="safe")
class SumOverParameters:
    """All-reduces over every mesh dimension that splits the parameters."""

    mesh: Mesh

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks of a float64 tensor of any shape, as a new tensor."""
        total = value.clone()
        for dimension in SPLITTING:
            self.mesh.group(dimension).sum(total)
        return total
