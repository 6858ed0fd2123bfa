"""Shifts of tensors between ranks through memory that they share."""

from collections.abc import Callable
from typing import Protocol

import attrs
import torch
from torch import Tensor

from drawloom.components.distributed.single_process import Done
from drawloom.ports import Group, Pending, SymmetricMemory

ALIGNMENT = 512
"""Alignment of slots, in bytes."""


class Shifts(Protocol):
    """Ranks that send tensors to one another: a group, or `PeerShifts`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def start_shift(self, sent: Tensor, received: Tensor, distance: int) -> Pending:
        """Start to send a tensor to the rank `distance` further on, and to receive from the one as far behind."""


class CopyStream:
    """A GPU's stream for copies beside computation; on a CPU copies are done at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def start(self, copy: Callable[[], None]) -> Pending:
        """Call `copy`, whose operations follow the earlier ones in the current stream."""
        if self._stream is None:
            copy()
            return Done()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            copy()
            return _StreamWork(self._stream.record_event())


class PeerShifts:
    """
    Shifts through symmetric memory: a rank copies from another's memory on a stream of its own.

    A GPU's copy engines do this without its multiprocessors, which messages would share with products. At most one
    exchange, of a shift to every other rank, may be in progress.

    Slots are used in turn. A rank reads a slot before it joins the barrier of the next shift. With one slot more than
    an exchange has shifts, a slot is written again only after that barrier.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self._memory: SymmetricMemory | None = None
        self._stream = CopyStream(group.device)
        self._slot_bytes = self._turn = 0

    def start_shift(self, sent: Tensor, received: Tensor, distance: int) -> Pending:
        """
        Start to copy the tensor on the rank `distance` behind, with the same size and dtype, to `received`.

        Raises UserError if ranks can't map each other's memory.
        """
        memory = self._provide_memory(sent)
        begin = self._turn % (self.size + 1) * self._slot_bytes
        self._turn += 1
        own, other = (
            memory.parts[rank][begin : begin + sent.nbytes].view(sent.dtype)
            for rank in (self.rank, (self.rank - distance) % self.size)
        )
        own.copy_(sent.view(-1))

        def copy() -> None:
            memory.barrier()
            received.view(-1).copy_(other)

        return self._stream.start(copy)

    def _provide_memory(self, sent: Tensor) -> SymmetricMemory:
        """Return memory with slots for a tensor; all ranks send tensors of one size, and allocate together."""
        if self._memory is None or sent.nbytes > self._slot_bytes:
            if sent.is_cuda:
                torch.cuda.synchronize(sent.device)  # no rank may still read the memory that is freed here
            self._slot_bytes = -(-sent.nbytes // ALIGNMENT) * ALIGNMENT
            self._memory = self.group.allocate_symmetric_memory((self.size + 1) * self._slot_bytes)
        return self._memory


@attrs.frozen(eq=False)
class _StreamWork:
    """A copy on another stream."""

    event: torch.cuda.Event

    def is_completed(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)
