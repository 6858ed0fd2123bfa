"""Sums over ranks that hold different parameters."""

from collections.abc import Sequence
from typing import Any

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
    """Two pipeline ranks, two replicas, and two ranks that shard."""

    world: Group = attrs.field(factory=SingleProcess)
    replicas: Group = attrs.field(factory=Twice)

    def group(self, *dimensions: str) -> Group:
        """Two ranks along pipeline, data_replicate and data_shard."""
        return Twice() if {"pipeline", "data_replicate", "data_shard"} & {*dimensions} else SingleProcess()

    def torch_mesh(self, *dimensions: Sequence[str]) -> Any:
        raise AssertionError("nothing is sharded")

    def size(self, dimension: str) -> int:
        """The number of ranks."""
        return self.group(dimension).size

    def index(self, dimension: str) -> int:
        """Index 0."""
        return 0


def test_replicas_are_not_summed() -> None:
    """The sum runs over ranks that split the layers or shard parameters, and not over replicas; the argument stays."""
    value = torch.tensor(3.0, dtype=torch.float64)
    total = SumOverParameters(mesh=FakeMesh()).total(value)
    assert (total.item(), total.dtype, value.item()) == (12, torch.float64, 3)
