"""Sums over the ranks that hold different parameters, so that a norm is one of the whole model."""

from torch import Tensor

from drawloom.components.ports.distributed import Mesh
from drawloom.graph import component

SPLITTING = ("pipeline",)
"""The dimensions along which parameters differ."""


@component(impact="safe")
class SumOverParameters:
    """Adds up along every dimension of the mesh that splits the parameters."""

    mesh: Mesh

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks of a float64 tensor; the tensor given is left as it is."""
        total = value.clone()
        for dimension in SPLITTING:
            self.mesh.group(dimension).sum(total)
        return total
