"""Sums over ranks that hold different parameters."""

import attrs
import torch
from torch import Tensor

from drawloom.components.distributed.process_group import SingleProcess
from drawloom.components.distributed.sum_over_shards import SumOverParameters
from drawloom.components.ports.distributed import Group


class Twice(SingleProcess):
    """Two ranks with equal values."""

    def sum(self, tensor: Tensor) -> None:
        """Two equal values."""
        tensor.mul_(2)


@attrs.define
class FakeMesh:
    """Two pipeline ranks, and two replicas."""

    world: Group = attrs.field(factory=SingleProcess)
    replicas: Group = attrs.field(factory=Twice)

    def group(self, dimension: str) -> Group:
        """Two ranks along pipeline and data_replicate."""
        return Twice() if dimension in ("pipeline", "data_replicate") else SingleProcess()

    def size(self, dimension: str) -> int:
        """The number of ranks."""
        return self.group(dimension).size

    def index(self, dimension: str) -> int:
        """Index 0."""
        return 0


def test_replicas_are_not_summed() -> None:
    """The sum runs over pipeline ranks and not over replicas; the argument is unchanged."""
    value = torch.tensor(3.0, dtype=torch.float64)
    total = SumOverParameters(mesh=FakeMesh()).total(value)
    assert (total.item(), total.dtype, value.item()) == (6, torch.float64, 3)
