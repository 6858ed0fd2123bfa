"""Sums over ranks with different parameters."""

import attrs
import pytest
import torch
from torch import Tensor

from drawloom.components.distributed.mesh_layout import Layout
from drawloom.components.distributed.planned import PlannedGroup, PlannedMesh
from drawloom.components.distributed.sum_over_shards import SumOverParameters
from drawloom.components.ports.distributed import DIMENSIONS


class EqualRanks(PlannedGroup):
    """Ranks with equal values."""

    def sum(self, tensor: Tensor) -> None:
        """Multiply by the number of ranks."""
        tensor.mul_(self.size)


class MeshOfEqualRanks(PlannedMesh):
    """A mesh of ranks with equal values."""

    def group(self, *dimensions: str) -> PlannedGroup:
        return EqualRanks(**attrs.asdict(super().group(*dimensions)))


@pytest.mark.parametrize(("expert", "copies"), [(1, 2), (2, 2), (4, 1)])
def test_sums_run_over_one_copy_of_the_model(expert: int, copies: int) -> None:
    """
    The sum runs over the ranks that split layers, parameters or experts, and not over replicas. In two replicas with
    two shards, four expert ranks make one copy together. The argument is unchanged.
    """
    sizes = dict.fromkeys(DIMENSIONS, 1) | {"pipeline": 2, "data_replicate": 2, "data_shard": 2}
    value = torch.tensor(3.0, dtype=torch.float64)
    total = SumOverParameters(mesh=MeshOfEqualRanks(Layout(sizes, expert))).sum_over_ranks(value)
    assert (total.item(), total.dtype, value.item()) == (3 * 8 / copies, torch.float64, 3)
