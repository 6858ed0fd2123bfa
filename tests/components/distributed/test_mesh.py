"""The mesh in real and fake processes."""

import math
import time
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.group_factory import GroupFactory
from drawloom.components.distributed.launched_ranks import LaunchedRanks
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.mesh_layout import SHARDS
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.components.distributed.torchrun import Launch
from drawloom.components.ports.distributed import Group
from drawloom.graph import UserError
from support.processes import RanksFailedError, run_ranks


@attrs.define
class FakeProcesses:
    """A launch with any world size, in which only this process exists."""

    world_size: int
    rank: int = 0
    node_rank: int = 0
    node_count: int = 1
    generation: int = 0
    requests: list[tuple[str, Sequence[Sequence[int]]]] = attrs.field(factory=list)

    def make_group(self, name: str, rank_sets: Sequence[Sequence[int]]) -> Group:
        """Record the request."""
        self.requests.append((name, rank_sets))
        return SingleProcess()

    def open_channel(self, name: str, first: int, second: int) -> Any:
        raise AssertionError("no tensor is sent")

    def make_control_group(self, name: str) -> Group:
        return SingleProcess()

    def set_replica_shape(self, stages: int, shards: int, shard_size: int, expert: int) -> None:
        pass


def mesh_of(processes: Any, **settings: Any) -> RankMesh:
    """Return the mesh of fake processes."""
    return RankMesh(processes=processes, **settings)


@attrs.define
class View:
    """The NodeView members read by `constraints`."""

    settings: dict[str, Any]

    def problem(self, key: str, text: str, hint: str = "") -> tuple[str, str]:
        """Return the key and the text of the problem."""
        return key, text

    def neighbour(self, edge: str) -> None:
        """Return no node."""


def _settings(**changed: Any) -> dict[str, Any]:
    names = ("pipeline", "data_replicate", "data_shard", "context", "tensor", "expert")
    return dict.fromkeys(names, 1) | {"data_replicate": "auto"} | changed


def _replicas_of_real_processes(**settings: Any) -> tuple[Any, ...]:
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"))
    mesh = RankMesh(processes=processes, **settings)
    processes.open()
    try:
        mesh.open()
        number = torch.tensor([1 + mesh.world.rank])
        mesh.replica_group.sum(number)
        sizes = {name: getattr(mesh.sizes, name) for name in ("pipeline", "data_replicate", "expert")}
        alone = mesh.tensor_group.gather_json("alone")
        return mesh.indices.data_replicate, mesh.replica_group.rank, number.item(), sizes, mesh.world.size, alone
    finally:
        processes.close()


def _wrong_product() -> str:
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"))
    mesh = RankMesh(processes=processes, data_replicate=3)
    processes.open()
    try:
        mesh.open()
    except UserError as error:
        return str(error)
    finally:
        processes.close()
    return "nothing was wrong"


def test_by_default_all_processes_are_replicas() -> None:
    """Two processes without settings are two replicas; every other dimension has size one."""
    sizes = {"pipeline": 1, "data_replicate": 2, "expert": 1}
    expected = [(rank, rank, 3, sizes, 2, ["alone"]) for rank in (0, 1)]
    assert run_ranks(_replicas_of_real_processes, 2) == expected


def test_a_wrong_product_stops_every_process() -> None:
    """If the mesh has three ranks, both of two processes raise, and neither waits for the other."""
    for text in run_ranks(_wrong_product, 2):
        assert "= 3 needs 3 processes, and there are 2" in text
        assert "`drawloom launch --nproc-per-node 3 run RECIPE`" in text


def test_every_process_makes_the_same_groups() -> None:
    """The groups and their order do not depend on the rank."""
    requests = []
    for rank in range(4):
        processes = FakeProcesses(world_size=4, rank=rank)
        mesh_of(processes).open()
        requests.append(processes.requests)
    assert all(rank_requests == requests[0] for rank_requests in requests)
    assert dict(requests[0])["data_replicate"] == [[0, 1, 2, 3]]
    assert dict(requests[0])["tensor"] == [[0], [1], [2], [3]]


def _of_many(rank: int, sizes: dict[str, int]) -> tuple[float, int, dict[str, int]]:
    """
    Return the seconds for a mesh of 1,024 ranks, torch's groups in it, and this rank's indices; no other rank exists.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=1024)
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"))
    processes._ranks = LaunchedRanks(Launch(rank, 1024, rank % 8, 8), processes.device, processes.limits, 9, None)
    processes._ranks.groups = GroupFactory(processes.device, rank, 1024, timeout=9)
    processes._ranks.groups.is_joined = True
    began = time.monotonic()
    mesh = RankMesh(processes=processes, **sizes)
    mesh.open()
    mesh.create_torch_mesh(("data_replicate",), SHARDS)
    indices = mesh.indices.without_expert_dimensions()
    return time.monotonic() - began, len({*filter(None, processes._ranks.groups._handles.values())}), indices


def test_a_thousand_ranks_take_no_time() -> None:
    """A rank makes only its own groups, once apiece, and knows its indices."""
    sizes = {"pipeline": 4, "data_replicate": 4, "data_shard": 8, "context": 2, "tensor": 4}
    seconds, groups, indices = run_ranks(_of_many, 1, 777, sizes, variables=False)[0]
    assert indices == {"pipeline": 3, "data_replicate": 0, "data_shard": 1, "context": 0, "tensor": 1}
    assert groups == 8  # all; pipeline, data_replicate, context and tensor; those of shards, of data and of a model
    assert seconds < 5
    assert run_ranks(_of_many, 1, 777, {"data_shard": 512}, variables=False)[0][1] == 3


def test_expert_must_divide_the_ranks_of_a_stage() -> None:
    """`check` reports an `expert` that does not divide a stage's known ranks, and an unchecked mesh raises."""
    text = "expert = 2 does not divide data_replicate × data_shard × context × tensor"
    for sizes in ({"data_replicate": 3}, {"data_replicate": 1}, {"context": 3, "pipeline": 2, "data_replicate": 1}):
        problems: list[Any] = list(RankMesh.constraints(View(_settings(expert=2, **sizes))))  # type: ignore[arg-type]
        assert problems == [("expert", f"{text} = {math.prod(sizes.values()) // sizes.get('pipeline', 1)}")]
    with pytest.raises(UserError, match=f"{text} = 3; write one of 1, 3"):
        mesh_of(FakeProcesses(world_size=3), expert=2).open()
    for sizes in ({}, {"data_replicate": 4}, {"data_shard": 3}, {"context": 3, "data_replicate": 2}, {"tensor": 6}):
        assert not list(RankMesh.constraints(View(_settings(expert=2, **sizes))))  # type: ignore[arg-type]


def test_expert_groups_are_made_only_for_expert_parallelism() -> None:
    """
    A mesh without expert parallelism makes no group for it; with it, there are groups for other and for the same
    experts.
    """
    for expert, names in (
        (1, set[str]()),
        (2, {"expert", "expert_shard", "expert_replicate", "expert_replicate × expert_shard"}),
    ):
        processes = FakeProcesses(world_size=8)
        mesh_of(processes, data_shard=4, expert=expert).open()
        requested = {name: sets for name, sets in processes.requests if name.startswith("expert")}
        assert requested.keys() == names
    assert requested["expert"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert requested["expert_shard"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert requested["expert_replicate × expert_shard"] == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("size", [0, -1])
def test_sizes_are_at_least_one(size: int) -> None:
    """A dimension of size zero or less is an invalid setting."""
    for name in _settings():
        with pytest.raises(ValueError, match=f"{size} is less than 1"):
            mesh_of(FakeProcesses(world_size=1), **{name: size})


def test_a_lost_replica_is_named() -> None:
    """When a process fails early, the others raise an error naming their group."""
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_leave_early, 2)
    assert "rank 1 gave up" in caught.value.failures[1]
    assert "in group data_replicate (ranks 0, 1)" in caught.value.failures[0]


def _leave_early() -> None:
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=20)
    mesh = RankMesh(processes=processes)
    processes.open()
    mesh.open()
    mesh.world.sum(torch.ones(1))
    if processes.rank == 1:
        raise RuntimeError("rank 1 gave up")
    mesh.replica_group.sum(torch.ones(1))
