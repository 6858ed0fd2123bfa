"""Point-to-point links between ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.p2p_links import Edge, connect_p2p_links, group_into_concurrent_rounds
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.graph import UserError
from support.exchanges import list_ring_edges
from support.processes import run_ranks


def _open_processes() -> TorchProcesses:
    processes = TorchProcesses(device=ComputeDevice(kind="cpu"), timeout=20.0)
    processes.open()
    return processes


def _exchange(lines: list[list[int]], edges: list[Edge]) -> dict[int, list[float]]:
    processes = _open_processes()
    links = connect_p2p_links(processes, "line", lines, edges)
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


def messages_to(rank: int, lines: list[list[int]], edges: list[Edge]) -> dict[int, list[float]]:
    """Return the messages of a rank's peers, by their index in the line."""
    line = next(line for line in lines if rank in line)
    here = line.index(rank)
    peers = {index for edge in edges if here in edge for index in edge} - {here}
    return {peer: [10.0 * line[peer] + n for n in range(3)] for peer in sorted(peers)}


@pytest.mark.parametrize(
    ("lines", "edges"),
    [
        ([[0, 1]], list_ring_edges(2)),
        ([[0, 1, 2]], list_ring_edges(3)),
        ([[0, 1, 2, 3]], [*list_ring_edges(4), (0, 2), (3, 1)]),  # more than a ring
        ([[0, 2], [1, 3]], list_ring_edges(2)),
        ([[0], [1]], []),
    ],
)
def test_tensors_arrive_in_the_order_sent(lines: list[list[int]], edges: list[Edge]) -> None:
    """Ranks receive from all their peers, in order, along any edges and in several lines at once."""
    world = sum(len(line) for line in lines)
    assert run_ranks(_exchange, world, lines, edges) == [messages_to(rank, lines, edges) for rank in range(world)]


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda edge: edge[0] != edge[1])))
def test_a_rank_connects_to_one_peer_at_a_time(edges: set[Edge]) -> None:
    """The rounds hold each edge exactly once, and no index twice in one round."""
    edges_by_round = group_into_concurrent_rounds(edges)
    assert sorted(edge for members in edges_by_round for edge in members) == sorted({(min(e), max(e)) for e in edges})
    for members in edges_by_round:
        indices = [index for edge in members for index in edge]
        assert len(indices) == len(set(indices))


@pytest.mark.parametrize("size", [2, 3, 512])
def test_a_ring_connects_in_three_rounds(size: int) -> None:
    """A ring of any size is connected in at most three rounds, and a rank has at most two peers."""
    assert len(group_into_concurrent_rounds(list_ring_edges(size))) <= 3


def _channels_open() -> int:
    processes = _open_processes()
    if processes.rank < 2:  # the other two ranks take no part
        connect_p2p_links(processes, "line", [[0, 1]], [(0, 1)])
    processes.close()
    return processes.rank


def test_connecting_two_ranks_does_not_involve_the_others() -> None:
    """Two of four ranks connect while the others do something else."""
    assert run_ranks(_channels_open, 4) == [0, 1, 2, 3]


def _opposite() -> str:
    processes = _open_processes()
    ((_, link),) = connect_p2p_links(processes, "ring", [[0, 1]], [(0, 1)]).items()
    mine = link.receive(torch.zeros(1))
    link.send(torch.ones(1)).wait()
    mine.wait()
    processes.close()
    return "received"


def test_opposite_directions_do_not_deadlock() -> None:
    """Two ranks that both receive before they send complete."""
    assert run_ranks(_opposite, 2) == ["received", "received"]


def _wait_for_missing_peer() -> str:
    processes = _open_processes()
    ((_, link),) = connect_p2p_links(processes, "ring", [[0, 1]], [(0, 1)]).items()
    if processes.rank == 1:
        return "left"
    with pytest.raises(UserError, match="rank 0"):
        link.receive(torch.zeros(1)).wait()
    return "error"


def test_a_dead_peer_is_an_error() -> None:
    """A receive from a process that has ended raises an error naming it instead of hanging."""
    assert run_ranks(_wait_for_missing_peer, 2) == ["error", "left"]
