"""
Point-to-point links: between two ranks, a communicator for each direction.

A communicator carries one direction and nothing else: NCCL runs the operations of a communicator one after another on
one stream, so that in a shared one a send would wait for a receive, or either for a collective. Setting one up is a
rendezvous of its two ranks on the host. Ranks that set theirs up in different orders deadlock (pytorch#108378,
nccl#783), so all ranks follow one order of rounds, in each of which a rank has at most one peer.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.distributed.process_group import peer_errors
from drawloom.components.distributed.rank_monitor import RankMonitor
from drawloom.components.ports.distributed import P2PChannel, Pending, Processes

Edge = tuple[int, int]


@attrs.define(eq=False)
class P2PWork:
    """A send or receive in progress; it holds its tensor until it is completed."""

    communicator: "TorchCommunicator"
    _work: Any
    _tensor: Tensor | None

    def is_completed(self) -> bool:
        """Whether the tensor has been sent or received (on a GPU: by the device)."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        """
        Wait for completion; on a GPU only the current stream waits, not the host.

        Raises a UserError if the peer is gone or takes too long.
        """
        if self._work is not None:
            with self.communicator.peer_errors():
                self._work.wait()
            self._work = self._tensor = None  # torch's Work keeps its tensors alive after completion


@attrs.frozen(eq=False)
class TorchCommunicator:
    """One end of a one-way communicator from `ranks[0]` to `ranks[1]`, over a torch backend (gloo or NCCL)."""

    name: str
    ranks: Edge
    backend: Any
    device: torch.device
    monitor: RankMonitor

    def send(self, tensor: Tensor) -> P2PWork:
        """Start to send a contiguous tensor of any shape and dtype."""
        with self.peer_errors():
            return P2PWork(self, self.backend.send([tensor], 1, 0), tensor)

    def receive(self, tensor: Tensor) -> P2PWork:
        """Start to receive into a contiguous tensor of any shape and dtype."""
        with self.peer_errors():
            return P2PWork(self, self.backend.recv([tensor], 0, 0), tensor)

    def peer_errors(self) -> AbstractContextManager[None]:
        """Mark this rank as blocked in a transfer of this communicator; torch's errors become a UserError."""
        return peer_errors(self.monitor, "a point-to-point transfer", self.name, self.ranks)


@attrs.frozen
class TorchP2PChannel:
    """The two communicators between this rank and a peer, one for each direction."""

    outgoing: TorchCommunicator
    incoming: TorchCommunicator

    def send(self, tensor: Tensor) -> Pending:
        """Start to send a contiguous tensor of any shape and dtype."""
        return self.outgoing.send(tensor)

    def receive(self, tensor: Tensor) -> Pending:
        """Start to receive into a contiguous tensor of any shape and dtype."""
        return self.incoming.receive(tensor)


def p2p_links(
    processes: Processes, name: str, lines: Sequence[Sequence[int]], edges: Iterable[Edge]
) -> dict[int, P2PChannel]:
    """
    The channels of this rank, by its peers' indices in its line.

    `lines` are disjoint sequences of ranks; `edges` are pairs of indices between which tensors travel, the same in
    each line. All ranks of a line call this with the same edges; no other rank takes part.
    """
    line = next(line for line in lines if processes.rank in line)
    here = line.index(processes.rank)
    links: dict[int, P2PChannel] = {}
    for low, high in (edge for edges_at_once in rounds(edges) for edge in edges_at_once):
        if here in (low, high):
            links[high if here == low else low] = processes.channel(f"{name} link", line[low], line[high])
    return dict(sorted(links.items()))


def rounds(edges: Iterable[Edge]) -> list[list[Edge]]:
    """Each edge once, lower index first, in rounds in which no index appears twice (greedy edge colouring)."""
    found: list[list[Edge]] = []
    busy: list[set[int]] = []  # for each round, the indices in it
    for edge in sorted({(min(edge), max(edge)) for edge in edges}):
        free = next((number for number, taken in enumerate(busy) if not taken & set(edge)), len(found))
        if free == len(found):
            found.append([])
            busy.append(set())
        found[free].append(edge)
        busy[free].update(edge)
    return found


def ring(size: int) -> list[Edge]:
    """The edges of a ring: each index with the next, the last with the first."""
    return [(index, (index + 1) % size) for index in range(size if size > 2 else size - 1)]
