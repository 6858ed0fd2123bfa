"""Sums over the ranks that hold different parameters, such as the squared gradient norm of the whole model."""

from torch import Tensor

from drawloom.components.ports.distributed import Mesh
from drawloom.graph import component


@component(impact="safe")
class SumOverParameters:
    """All-reduces over the ranks that hold one copy of the model together."""

    mesh: Mesh

    def total(self, value: Tensor) -> Tensor:
        """The sum over ranks of a float64 tensor of any shape, as a new tensor."""
        total = value.clone()
        self.mesh.model_group.sum(total)
        return total

    def largest(self, value: Tensor) -> Tensor:
        """The maximum over ranks of a float64 tensor of any shape, as a new tensor."""
        largest = value.clone()
        self.mesh.model_group.max(largest)
        return largest
