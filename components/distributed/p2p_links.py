"""
Point-to-point links between two ranks, with a communicator per direction.

A communicator carries only one direction: NCCL runs a communicator's operations one after another on one stream, so in
a shared communicator a send would wait for a receive, or either for a collective. Connecting a communicator is a
rendezvous between its two ranks on the host. Different connection orders deadlock (pytorch#108378, nccl#783), so all
ranks follow one order of rounds, and a rank has at most one peer per round.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from drawloom.components.distributed.process_group import mark_blocked_and_convert_errors
from drawloom.components.distributed.rank_monitor import RankMonitor
from drawloom.components.ports.distributed import P2PChannel, Pending, Processes

Edge = tuple[int, int]


@attrs.define(eq=False)
class P2PWork:
    """A send or receive in progress; it keeps its tensor alive until it is completed."""

    communicator: "TorchCommunicator"
    _work: Any
    _tensor: Tensor | None

    def is_completed(self) -> bool:
        """Return whether the tensor has been sent or received (on a GPU: by the device)."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        if self._work is not None:
            with self.communicator.mark_blocked_and_convert_errors():
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
        """Start to send a contiguous tensor (any shape and dtype)."""
        with self.mark_blocked_and_convert_errors():
            return P2PWork(self, self.backend.send([tensor], 1, 0), tensor)

    def receive(self, tensor: Tensor) -> P2PWork:
        """Start to receive into a contiguous tensor (any shape and dtype)."""
        with self.mark_blocked_and_convert_errors():
            return P2PWork(self, self.backend.recv([tensor], 0, 0), tensor)

    def mark_blocked_and_convert_errors(self) -> AbstractContextManager[None]:
        """Mark this rank as blocked in this communicator's transfer, and convert torch's errors to a UserError."""
        return mark_blocked_and_convert_errors(self.monitor, "a point-to-point transfer", self.name, self.ranks)


@attrs.frozen
class TorchP2PChannel:
    """The two communicators between this rank and a peer, one per direction."""

    outgoing: TorchCommunicator
    incoming: TorchCommunicator

    def send(self, tensor: Tensor) -> Pending:
        return self.outgoing.send(tensor)

    def receive(self, tensor: Tensor) -> Pending:
        return self.incoming.receive(tensor)


def connect_two_ranks_by_nccl(store: Any, rank: int, ranks: Edge, timeout: timedelta, device: torch.device) -> Any:
    """
    Return an NCCL communicator for two ranks outside torch's group registry, in which this one is `rank`, 0 or 1.

    dist.new_group is collective over all ranks, and with a bound device it shares one NCCL communicator among all
    point-to-point operations in a group.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = list(ranks)
    with _suppress_serialization_warning():
        backend = dist.ProcessGroupNCCL(store, rank, 2, options)
    backend.eager_connect_single_device(device)
    return backend


@contextmanager
def _suppress_serialization_warning() -> Iterator[None]:
    """Suppress NCCL's warning that these backends' operations run one after another, as intended here."""
    name = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def connect_p2p_links(
    processes: Processes, name: str, disjoint_rank_lines: Sequence[Sequence[int]], edges: Iterable[Edge]
) -> dict[int, P2PChannel]:
    """
    Connect this rank to its peers, and return its channels by the peers' indices in its line.

    `disjoint_rank_lines` are rank sequences, and `edges` are index pairs with transfers, equal for all lines. All ranks
    in a line call this with the same edges; no other rank takes part.
    """
    line = next(line for line in disjoint_rank_lines if processes.rank in line)
    index = line.index(processes.rank)
    links: dict[int, P2PChannel] = {}
    for low, high in (edge for concurrent_edges in group_into_concurrent_rounds(edges) for edge in concurrent_edges):
        if index in (low, high):
            links[high if index == low else low] = processes.open_channel(f"{name} link", line[low], line[high])
    return dict(sorted(links.items()))


def group_into_concurrent_rounds(edges: Iterable[Edge]) -> list[list[Edge]]:
    """Return the edges, lower index first, in rounds where no index appears twice (greedy edge colouring)."""
    edges_by_round: list[list[Edge]] = []
    busy_by_round: list[set[int]] = []
    for edge in sorted({(min(edge), max(edge)) for edge in edges}):
        free_rounds = (number for number, busy in enumerate(busy_by_round) if not busy & set(edge))
        number = next(free_rounds, len(edges_by_round))
        if number == len(edges_by_round):
            edges_by_round.append([])
            busy_by_round.append(set())
        edges_by_round[number].append(edge)
        busy_by_round[number].update(edge)
    return edges_by_round


def list_ring_edges(size: int) -> list[Edge]:
    """Return a ring's edges: every index with the next, and the last with the first."""
    return [(index, (index + 1) % size) for index in range(size if size > 2 else size - 1)]
