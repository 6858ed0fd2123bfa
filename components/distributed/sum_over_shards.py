"""Sums over the ranks that hold different parameters, such as the squared gradient norm of the whole model."""

from torch import Tensor

from drawloom.components.ports.distributed import SHARDS, Mesh
from drawloom.graph import component

SPLITS = (("pipeline",), SHARDS, ("tensor",))
"""The dimensions of the mesh that split the parameters."""


@component(impact="safe")
class SumOverParameters:
    """All-reduces over every mesh dimension that splits the parameters."""

    mesh: Mesh

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks of a float64 tensor of any shape, as a new tensor."""
        total = value.clone()
        for dimensions in SPLITS:
            self.mesh.group(*dimensions).sum(total)
        return total

    def largest(self, value: Tensor) -> Tensor:
        """The maximum over ranks of a float64 tensor of any shape, as a new tensor."""
        largest = value.clone()
        for dimensions in SPLITS:
            self.mesh.group(*dimensions).max(largest)
        return largest
