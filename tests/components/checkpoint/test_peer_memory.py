"""Copies at neighbours that are sent while training continues."""

import time

import torch

from drawloom.components.checkpoint.peer_memory import NeighbourCopy, PeerMemory, StateMemory
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
