"""Point-to-point links between ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.p2p_links import Edge, p2p_links, ring, rounds
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.graph import UserError
from support.processes import run_ranks


def _opened() -> TorchProcesses:
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=20.0)
    processes.open()
    return processes


def _exchange(lines: list[list[int]], edges: list[Edge]) -> dict[int, list[float]]:
    processes = _opened()
    links = p2p_links(processes, "line", lines, edges)
    sent = [link.send(torch.full((2,), 10.0 * processes.rank + n)) for n in range(3) for link in links.values()]
    received = {}
    for peer, link in links.items():
        boxes = [torch.zeros(2) for _ in range(3)]
        for message in [link.receive(box) for box in boxes]:
            message.wait()
        received[peer] = [float(box[0]) for box in boxes]
    for message in sent:
        message.wait()
        assert message.is_completed()
    processes.close()
    return received


def expected(rank: int, lines: list[list[int]], edges: list[Edge]) -> dict[int, list[float]]:
    """What each peer of a rank sends, by its index in the line."""
    line = next(line for line in lines if rank in line)
    here = line.index(rank)
    peers = {index for edge in edges if here in edge for index in edge} - {here}
    return {peer: [10.0 * line[peer] + n for n in range(3)] for peer in sorted(peers)}


@pytest.mark.parametrize(
    ("lines", "edges"),
    [
        ([[0, 1]], ring(2)),
        ([[0, 1, 2]], ring(3)),
        ([[0, 1, 2, 3]], [*ring(4), (0, 2), (3, 1)]),  # more than a ring
        ([[0, 2], [1, 3]], ring(2)),
        ([[0], [1]], []),
    ],
)
def test_peers_get_what_was_sent_in_its_order(lines: list[list[int]], edges: list[Edge]) -> None:
    """Each rank hears all of its peers, in order, along any edges and in several lines at once."""
    world = sum(len(line) for line in lines)
    assert run_ranks(_exchange, world, lines, edges) == [expected(rank, lines, edges) for rank in range(world)]


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda edge: edge[0] != edge[1])))
def test_a_rank_connects_to_one_peer_at_a_time(edges: set[Edge]) -> None:
    """Rounds hold each edge once, none twice, and no index twice in one round: nobody waits in two places."""
    found = rounds(edges)
    assert sorted(edge for members in found for edge in members) == sorted({(min(e), max(e)) for e in edges})
    for members in found:
        indices = [index for edge in members for index in edge]
        assert len(indices) == len(set(indices))


@pytest.mark.parametrize("size", [2, 3, 512])
def test_a_ring_connects_in_rounds_and_not_one_after_another(size: int) -> None:
    """However large a ring is, it is connected in three rounds at most, and a rank has two peers at most."""
    assert len(rounds(ring(size))) <= 3


def _channels_open() -> int:
    processes = _opened()
    if processes.rank < 2:  # the other two ranks take no part
        p2p_links(processes, "line", [[0, 1]], [(0, 1)])
    processes.close()
    return processes.rank


def test_ranks_that_are_no_end_of_a_link_take_no_part() -> None:
    """Two of four ranks connect while the others do something else."""
    assert run_ranks(_channels_open, 4) == [0, 1, 2, 3]


def _opposite() -> str:
    processes = _opened()
    ((_, link),) = p2p_links(processes, "ring", [[0, 1]], [(0, 1)]).items()
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
    ((_, link),) = p2p_links(processes, "ring", [[0, 1]], [(0, 1)]).items()
    if processes.rank == 1:
        return "left"
    with pytest.raises(UserError, match="rank 0"):
        link.receive(torch.zeros(1)).wait()
    return "told"


def test_a_peer_that_is_gone_is_told() -> None:
    """Whoever waits for a message of a process that ended gets a sentence, not a hang."""
    assert run_ranks(_deserted, 2) == ["told", "left"]
