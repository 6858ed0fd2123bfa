"""Transfers with random delays, which expose memory that is used before a copy arrives or reused before one leaves."""

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.features import Copies, Ticket


@attrs.define(eq=False)
class _Copy:
    """Copies that are queued together: at their begin a target on the device becomes NaN, at their end data arrives."""

    copies: Copies
    after: Sequence[Ticket]
    state: str = "waiting"

    @property
    def is_ready(self) -> bool:
        return all(ticket is None or ticket.state == "done" for ticket in self.after)


@attrs.define(eq=False)
class DelayedTransfers:
    """
    Transfers on a CPU that happen at random times, in order in each direction, and as late as a wait allows.

    The target of a copy to the device is full of NaN from its beginning to its end. `fetched` and `stored` count bytes.
    """

    seed: int = 0
    fetched: int = 0
    stored: int = 0
    _queues: dict[str, deque[_Copy]] = attrs.field(init=False, factory=lambda: {"fetch": deque(), "store": deque()})
    _random: random.Random = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        """Seed the delays."""
        self._random = random.Random(self.seed)

    def allocate_pinned_host_memory(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def copy_to_device(self, copies: Copies, after: Sequence[Ticket] = ()) -> Ticket:
        self.fetched += sum(target.nbytes for target, _ in copies)
        return self._add("fetch", copies, after)

    def copy_to_host(self, copies: Copies, after: Sequence[Ticket] = ()) -> Ticket:
        self.stored += sum(target.nbytes for target, _ in copies)
        return self._add("store", copies, after)

    def mark_computation(self) -> Ticket:
        return None  # computation on a CPU has ended

    def make_computation_wait(self, ticket: Ticket) -> None:
        self._advance(self._random.randrange(4))
        while ticket is not None and ticket.state != "done":
            self._advance(1)

    def synchronize(self) -> None:
        while any(self._queues.values()):
            self._advance(1)

    def close(self) -> None:
        self.synchronize()

    def _add(self, direction: str, copies: Copies, after: Sequence[Ticket]) -> Any:
        copy = _Copy(copies, after)
        self._queues[direction].append(copy)
        self._advance(self._random.randrange(3))
        return copy

    def _advance(self, count: int) -> None:
        """Begin or end the next copy of a random direction, `count` times."""
        for _ in range(count):
            ready = [queue for queue in self._queues.values() if queue and queue[0].is_ready]
            if not ready:
                return
            queue = self._random.choice(ready)
            copy = queue[0]
            if copy.state == "waiting":
                copy.state = "under way"
                for target, _ in copy.copies if queue is self._queues["fetch"] else ():
                    target.view(torch.uint8).fill_(0xFF)
            else:
                for target, source in copy.copies:
                    target.copy_(source)
                copy.state, copy.copies = "done", ()
                queue.popleft()


class NoWaits(DelayedTransfers):
    """Transfers that do not let computation wait for an arrival."""

    def make_computation_wait(self, ticket: Ticket) -> None: ...
