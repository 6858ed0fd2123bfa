"""
Memory that is kept from one copy to the next.

Fresh memory costs a page fault for every page, several times as much as copying into memory that was used before. A
buffer belongs to whoever holds a tensor in it, and is used again when the last one is gone: nobody has to give it back,
and no two copies can be in the same place.
"""

import threading
import weakref
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.graph import UserError

KEPT = 2  # unused buffers: one for the next copy, one in case it begins before the last is written
ALIGNED = 64  # bytes, as torch does itself
SMALLEST = 2**20  # bytes of a buffer


@attrs.define(eq=False)
class Buffer:
    """Some bytes; `memory` exports them, `holders` counts the tensors that lie in it."""

    size: int
    memory: Any
    holders: int = 0


class Lease:
    """A buffer while parts of it are handed out."""

    def __init__(self, pool: "Pool", buffer: Buffer) -> None:
        self._pool = pool
        self._buffer = buffer
        self._end = 0

    def part(self, size: int) -> Tensor:
        """The next bytes, at least one of them, as a uint8 tensor with a storage of its own."""
        start, self._end = self._end, self._end + aligned(size)
        exported = memoryview(self._buffer.memory)[start : start + size]
        self._pool.hold(self._buffer)
        weakref.finalize(exported, self._pool.release, self._buffer).atexit = False
        return torch.frombuffer(exported, dtype=torch.uint8)

    def __enter__(self) -> "Lease":
        self._pool.hold(self._buffer)
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.release(self._buffer)


class Pool:
    """Buffers on the CPU, `pinned` for fast copies from a GPU; `kept` of those that are unused wait for the next."""

    def __init__(self, *, kept: int = KEPT, pinned: bool = False) -> None:
        self._kept = kept
        self._pinned = pinned
        self._unused: list[Buffer] = []
        self._lock = threading.RLock()  # a finalizer may run wherever the holder of the lock makes an object

    def lease(self, size: int) -> Lease:
        """A buffer of at least so many bytes, to be used in a `with` block."""
        with self._lock:
            fitting = [buffer for buffer in reversed(self._unused) if size <= buffer.size <= 2 * max(size, SMALLEST)]
            if fitting:
                buffer = min(fitting, key=lambda each: each.size)
                self._unused.remove(buffer)
                return Lease(self, buffer)
            self._unused.clear()  # the state has another size than before
        return Lease(self, self._make(size))

    def clear(self) -> None:
        """Keep nothing from now on; what is in use goes when it is not."""
        with self._lock:
            self._kept = 0
            self._unused.clear()

    def hold(self, buffer: Buffer) -> None:
        """Count one more tensor in a buffer."""
        with self._lock:
            buffer.holders += 1

    def release(self, buffer: Buffer) -> None:
        """Count one tensor less."""
        with self._lock:
            buffer.holders -= 1
            if not buffer.holders and len(self._unused) < self._kept:
                self._unused.append(buffer)

    def _make(self, size: int) -> Buffer:
        size = max(SMALLEST, size)
        try:
            return Buffer(size, torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned).numpy())
        except (RuntimeError, MemoryError) as error:
            why = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            raise UserError(
                f"there is no memory for a copy of the state, {size} bytes ({why}); give the run more memory, or write "
                'staging.use = "checkpoint.staging.none", which copies nothing'
            ) from error


def aligned(size: int) -> int:
    """So many bytes, up to where the next part may begin."""
    return -(-size // ALIGNED) * ALIGNED
