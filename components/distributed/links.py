"""Channels between neighbours in a ring of ranks: a group of two for each neighbour and direction."""

from collections.abc import Iterable, Iterator, Sequence

import attrs
import torch
from torch import Tensor

from drawloom.components.distributed.groups import OneRank, ProcessGroup
from drawloom.components.ports.distributed import Link, Pending, Processes

Edge = tuple[int, int]


@attrs.frozen
class NeighbourLink:
    """What this rank sends goes through one group, what it receives through the other."""

    outgoing: ProcessGroup
    incoming: ProcessGroup

    def send(self, tensor: Tensor) -> Pending:
        """Begin to send a contiguous tensor."""
        return self.outgoing.send(tensor, 1)

    def receive(self, tensor: Tensor) -> Pending:
        """Begin to receive into a contiguous tensor."""
        return self.incoming.receive(tensor, 0)


def ring_links(processes: Processes, name: str, rings: Sequence[Sequence[int]]) -> dict[int, Link]:
    """
    The neighbours of this process in its ring, by their places in it. All processes ask together.

    Each ring is a set of ranks in order, the last beside the first; rings are disjoint and hold every rank.
    """
    mine = next(ring for ring in rings if processes.rank in ring)
    found: dict[Edge, ProcessGroup] = {}
    for edges in _matchings(len(mine)):
        for way in (edges, [(end, start) for start, end in edges]):
            group = processes.group(f"{name} link", [*_pairs(rings, way)])
            if not isinstance(group, OneRank):
                edge = next(edge for edge in way if processes.rank in (mine[edge[0]], mine[edge[1]]))
                found[edge] = group  # type: ignore[assignment]
    here = list(mine).index(processes.rank)
    peers = {other for edge in found for other in edge if other != here and here in edge}
    links = {peer: NeighbourLink(found[here, peer], found[peer, here]) for peer in sorted(peers)}
    _warm_up(links.values())
    return dict(links)


def _warm_up(links: Iterable[NeighbourLink]) -> None:
    """Send a number through every channel, so that none is connected in the middle of a step, where others wait."""
    sent = [link.send(torch.zeros(1, device=link.outgoing.device)) for link in links]
    for message in [*sent, *(link.receive(torch.zeros(1, device=link.incoming.device)) for link in links)]:
        message.wait()


def _matchings(size: int) -> list[list[Edge]]:
    """The edges of a ring in sets in which no rank stands twice, since a group call takes disjoint sets."""
    if size < 2:
        return []
    ring = [(rank, (rank + 1) % size) for rank in range(size if size > 2 else 1)]
    odd_one = ring.pop() if size > 2 and size % 2 else None
    return [part for part in (ring[::2], ring[1::2], [odd_one] if odd_one else []) if part]


def _pairs(rings: Sequence[Sequence[int]], edges: Sequence[Edge]) -> Iterator[list[int]]:
    """The ranks at the ends of edges, sender first, in every ring; and those that are at no end, alone."""
    for ring in rings:
        ends = [[ring[start], ring[end]] for start, end in edges]
        yield from ends
        yield from ([rank] for rank in ring if not any(rank in pair for pair in ends))
