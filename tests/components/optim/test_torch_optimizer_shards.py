"""Shards of parameters and the keys of their noise."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from drawloom.components.optim.torch_optimizer import LocalShard, local_part, shard_of


@pytest.fixture
def second_of_four() -> Iterator[DeviceMesh]:
    """A mesh of two by two ranks, of which this is rank 2."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield DeviceMesh("cpu", [[0, 1], [2, 3]])
    dist.destroy_process_group()


def test_a_plain_tensor_is_its_own_shard() -> None:
    """A tensor that is not a DTensor has its first element at 0."""
    tensor = torch.ones(3, 4)
    assert local_part(tensor) is tensor
    assert shard_of(tensor, 2) == LocalShard()


def test_shards_of_dtensors(second_of_four: DeviceMesh) -> None:
    """Rows are a contiguous range and columns are not; replicas have equal shards; unaligned ranges have offsets."""
    numbers = torch.arange(60).view(6, 10)

    def part(*placements: Shard | Replicate) -> LocalShard:
        return shard_of(distribute_tensor(numbers, second_of_four, placements, src_data_rank=None), 2)

    assert part(Replicate(), Replicate()) == LocalShard()
    assert part(Shard(0), Replicate()) == LocalShard(30)
    assert part(Replicate(), Shard(0)) == LocalShard(0)
    assert part(Shard(1), Replicate()) == LocalShard(offset=(0, 5))
    assert part(Shard(0), Shard(1)) == LocalShard(offset=(3, 0))
    assert part(Shard(0), Shard(0)).first == 30
    odd = distribute_tensor(torch.arange(6), second_of_four, [Shard(0), Replicate()], src_data_rank=None)
    assert shard_of(odd, 2) == LocalShard(offset=(3,))
    assert local_part(odd).tolist() == [3, 4, 5]


def test_only_contiguous_ranges_share_the_key() -> None:
    """Contiguous ranges have the whole parameter's key, other shards have keys of their own."""
    keys = {shard.key(1, "noise", "w") for shard in (LocalShard(), LocalShard(8), LocalShard(offset=(0, 5)))}
    assert len(keys) == 2
    assert LocalShard().key(1, "noise", "w") != LocalShard().key(2, "noise", "w")
