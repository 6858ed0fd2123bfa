"""Reductions over the ranks with different parameters, for example of the whole model's squared gradient norm."""

from torch import Tensor

from drawloom import component
from drawloom.ports import Mesh


@component(impact="safe")
class SumOverParameters:
    """Reductions over the ranks that together contain one model copy."""

    mesh: Mesh

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        total = value.clone()
        self.mesh.model_copy_group.sum(total)
        return total

    def max_over_ranks(self, value: Tensor) -> Tensor:
        largest = value.clone()
        self.mesh.model_copy_group.max(largest)
        return largest
