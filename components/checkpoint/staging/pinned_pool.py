"""
CPU memory for copies of the state, pinned for GPUs, reused from one copy to the next.

New memory costs a page fault for every page, several times as much as copying into reused memory. A buffer returns to
the pool when the last tensor in it is freed: nothing is released by hand, and no two copies share a buffer.
"""

import threading
import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from drawloom.graph import UserError

KEPT = 2  # unused buffers: a copy may begin before the last one is written
ALIGNED = 64  # bytes, as torch aligns its own memory
SMALLEST = 2**20  # bytes of a buffer

Buffer = Any
"""A numpy array of uint8: what it exports to tensors keeps it alive, and it can be watched by weakref.finalize."""


class Pool:
    """CPU buffers, `pinned` for fast copies from a GPU, of which up to `kept` unused ones are kept."""

    def __init__(self, *, kept: int = KEPT, pinned: bool = False) -> None:
        self._kept = kept
        self._pinned = pinned
        self._unused: list[Buffer] = []
        self._lock = threading.RLock()  # reentrant: a finalizer may run while this thread holds it

    def tensors(self, sizes: Sequence[int]) -> list[Tensor]:
        """
        Uninitialized uint8 tensors in one buffer, each (size,) with a separate storage; sizes are at least 1.

        Raises UserError if the memory can't be allocated.
        """
        starts = [0, *accumulate(-(-size // ALIGNED) * ALIGNED for size in sizes)]
        buffer = self._buffer(starts[-1])
        exporter = buffer[:]  # lives as long as a tensor in it
        weakref.finalize(exporter, self._release, buffer).atexit = False
        parts = [memoryview(exporter)[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        return [torch.frombuffer(part, dtype=torch.uint8) for part in parts]

    def clear(self) -> None:
        """Free the unused buffers, and keep none any more."""
        with self._lock:
            self._kept = 0
            self._unused.clear()

    def _buffer(self, size: int) -> Buffer:
        """An unused buffer that fits, or a new one."""
        with self._lock:
            fitting = [buffer for buffer in self._unused if size <= buffer.size <= 2 * max(size, SMALLEST)]
            if not fitting:  # the state has another size now: no unused buffer will fit again
                self._unused.clear()
                return self._allocate(max(size, SMALLEST))
            best = min(fitting, key=lambda buffer: buffer.size)
            self._unused = [buffer for buffer in self._unused if buffer is not best]
            return best

    def _allocate(self, size: int) -> Buffer:
        try:
            return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned).numpy()
        except (RuntimeError, MemoryError) as error:
            why = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"can't allocate {size} bytes for a copy of the state ({why}); give the run more memory, or write "
                'staging.use = "checkpoint.staging.none", which copies nothing'
            ) from error

    def _release(self, buffer: Buffer) -> None:
        with self._lock:
            if len(self._unused) < self._kept:
                self._unused.append(buffer)
