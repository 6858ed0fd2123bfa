"""Channels between neighbours in a ring."""

import pytest
import torch

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.links import ring_links
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.graph import UserError
from support.processes import run_ranks


def _opened() -> TorchProcesses:
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=20.0)
    processes.open()
    return processes


def _around(rings: list[list[int]]) -> dict[int, list[float]]:
    processes = _opened()
    links = ring_links(processes, "ring", rings)
    sent = [link.send(torch.full((2,), 10.0 * processes.rank + n)) for n in range(3) for link in links.values()]
    received = {}
    for peer, link in links.items():
        boxes = [torch.zeros(2) for _ in range(3)]
        for message in [link.receive(box) for box in boxes]:
            message.wait()
        received[peer] = [float(box[0]) for box in boxes]
    for message in sent:
        message.wait()
        assert message.is_over()
    processes.close()
    return received


def expected(rank: int, rings: list[list[int]]) -> dict[int, list[float]]:
    """What each neighbour of a rank sends, by its place in the ring."""
    ring = next(ring for ring in rings if rank in ring)
    here = ring.index(rank)
    places = {(here + 1) % len(ring), (here - 1) % len(ring)} - {here}
    return {place: [10.0 * ring[place] + n for n in range(3)] for place in sorted(places)}


@pytest.mark.parametrize("rings", [[[0, 1]], [[0, 1, 2]], [[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1]]])
def test_neighbours_get_what_was_sent_in_its_order(rings: list[list[int]]) -> None:
    """Each rank hears both of its neighbours, in order, in rings of any size and in several rings at once."""
    world = sum(len(ring) for ring in rings)
    assert run_ranks(_around, world, rings) == [expected(rank, rings) for rank in range(world)]


def _opposite() -> str:
    processes = _opened()
    ((_, link),) = ring_links(processes, "ring", [[0, 1]]).items()
    mine = link.receive(torch.zeros(1))
    link.send(torch.ones(1)).wait()
    mine.wait()
    processes.close()
    return "both"


def test_the_two_directions_do_not_wait_for_one_another() -> None:
    """Two ranks that both receive before they send get what they wait for."""
    assert run_ranks(_opposite, 2) == ["both", "both"]


def _deserted() -> str:
    processes = _opened()
    ((_, link),) = ring_links(processes, "ring", [[0, 1]]).items()
    if processes.rank == 1:
        return "left"
    with pytest.raises(UserError, match="rank 0"):
        link.receive(torch.zeros(1)).wait()
    return "told"


def test_a_peer_that_is_gone_is_told() -> None:
    """Whoever waits for a message of a process that ended gets a sentence, not a hang."""
    assert run_ranks(_deserted, 2) == ["told", "left"]
