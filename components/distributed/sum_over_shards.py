"""Sums over the ranks that hold different parameters, such as the squared gradient norm of the whole model."""

from torch import Tensor

from drawloom.components.ports.distributed import SHARDS, Mesh
from drawloom.graph import component


@component(impact="safe")
class SumOverParameters:
    """All-reduces over every mesh dimension that splits the parameters."""

    mesh: Mesh

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks of a float64 tensor of any shape, as a new tensor."""
        total = value.clone()
        self.mesh.group("pipeline").sum(total)
        self.mesh.group(*SHARDS).sum(total)
        self.mesh.group("tensor").sum(total)
        return total
