"""Parts of parameters and the noise that belongs to them."""

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
    """A mesh of two by two ranks, of which this is the last but one."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    yield DeviceMesh("cpu", [[0, 1], [2, 3]])
    dist.destroy_process_group()


def test_a_whole_tensor_is_its_own_part() -> None:
    """What is not distributed begins at 0 and is the whole."""
    tensor = torch.ones(3, 4)
    assert local_part(tensor) is tensor
    assert shard_of(tensor, 2) == LocalShard()


def test_parts_of_distributed_tensors(second_of_four: DeviceMesh) -> None:
    """Rows are a run of the whole, columns are not; replicas have the same part; a run may begin at a wrong place."""
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


def test_keys() -> None:
    """Runs of the whole share the whole's key, other parts have keys of their own."""
    keys = {shard.key(1, "noise", "w") for shard in (LocalShard(), LocalShard(8), LocalShard(offset=(0, 5)))}
    assert len(keys) == 2
    assert LocalShard().key(1, "noise", "w") != LocalShard().key(2, "noise", "w")
