"""Copies at neighbours on other machines, sent while training continues."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drawloom.components.checkpoint.memory_exchange import NeighbourCopy
from drawloom.components.checkpoint.peer_memory import PeerMemory, StateMemory, _choose_copy_source_by_rank
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.mesh import RankMesh
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.ports.run import Step
from support.checkpoints import StateNode
from support.processes import run_ranks

LATE = 0.5  # seconds by which rank 1 comes later


def _keep_and_update() -> tuple[float, list[tuple[int, float]], int, float]:
    """
    Return seconds in `keep`, steps and values in the copies of the neighbour's weight, and the restored step and value.
    """
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"))
    processes.open()
    mesh = RankMesh(processes=processes, data_shard=2)
    mesh.open()
    node = StateNode()
    memory = StateMemory()
    try:
        peers = PeerMemory.choose_neighbours_and_create(memory, mesh, processes, {"memory": node}, 2)
        seconds, rank = 0.0, processes.rank
        for index in range(1, 5):
            node.state["weight"] = torch.full((4,), float(10 * index + rank))
            if index == 2:
                time.sleep(LATE * rank)
                start = time.monotonic()
            peers.reference_and_send(Step(index, 10))
            if index == 2:
                seconds = time.monotonic() - start
            peers.wait_until_copied()
            node.state["weight"].fill_(-1)  # the update
        copies = [part for part in memory.list_intact_parts().values() if isinstance(part, NeighbourCopy)]
        values = [(part.key.step, next(iter(part.packed.tensors.values()))[0].item()) for part in copies]
        restored = peers.restore(0)
        return seconds, values, restored, node.state["weight"][0].item()
    finally:
        peers.close()
        processes.close()


def test_a_copy_is_sent_while_training_continues() -> None:
    """Only the update waits for the late neighbour, and the copy has the values before it."""
    (early, copies, restored, value), (_, others, _, other_value) = run_ranks(_keep_and_update, 2)
    assert early < LATE / 2
    assert copies == [(2, 21.0), (4, 41.0)] and others == [(2, 20.0), (4, 40.0)]
    assert restored == 4 and (value, other_value) == (40.0, 41.0)


@pytest.mark.parametrize(
    ("machines", "pairs"),
    [
        ([0, 0, 1, 1], 4),
        ([0, 1, 1, 2], 4),
        ([0, 0, 0, 0, 1, 1], 4),  # two ranks of the first machine have no partner on the other
        ([0, 0, 0], 0),
        ([0], 0),
    ],
)
def test_as_many_copies_as_possible_are_on_another_machine(machines: list[int], pairs: int) -> None:
    """Every rank of a replica has another rank's copy; a replica of one rank has none."""
    ranks = range(len(machines))
    members = [[machine, rank] for rank, machine in enumerate(machines)]
    sources = []
    for rank in ranks:
        replica = SimpleNamespace(rank=rank, size=len(machines), gather_json=lambda _: members)
        mesh: Any = SimpleNamespace(
            model_copy_group=replica, world=SimpleNamespace(rank=rank, gather_json=lambda source: [source])
        )
        sources += _choose_copy_source_by_rank(mesh, machines[rank])
    assert sorted(sources) == [*ranks] * (len(machines) > 1)
    assert sum(machines[rank] != machines[source] for rank, source in enumerate(sources)) == pairs
    assert not any(rank == source for rank, source in enumerate(sources))
