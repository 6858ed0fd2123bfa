"""
Copy plans for state dicts, with CPU memory that the next copy can reuse.

Tensors that are equal views on the same memory also share it in the copy. A small view, such as one column in a large
matrix, is copied without the rest of its storage.
"""

import threading
import weakref
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom import UserError
from drawloom.components.state.trees import map_leaves_with_path
from drawloom.ports import NodeState

PLAIN = (bool, int, float, complex, str, bytes, type(None))

KEPT = 2  # unused buffers to keep, because a copy may begin before the last one is written
ALIGNMENT = 64  # bytes, as torch aligns its own memory
MIN_BUFFER_SIZE = 2**20  # bytes

Buffer = Any
"""A numpy array of uint8, which its exported tensors keep alive, and weakref.finalize can watch."""


class Pool:
    """Pool for CPU buffers, `pinned` for fast copies from a GPU, with up to `kept` unused buffers."""

    def __init__(self, *, kept: int = KEPT, pinned: bool = False) -> None:
        self._kept = kept
        self._pinned = pinned
        self._unused: list[Buffer] = []
        self._lock = threading.RLock()  # reentrant, because a finalizer may run while this thread has the lock

    def allocate_tensors(self, sizes: Sequence[int]) -> list[Tensor]:
        """
        Return uninitialized uint8 tensors (size,) in one buffer, with separate storages; sizes are at
        least 1.

        Raises UserError if the memory can't be allocated.
        """
        starts = [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        buffer = self._take_buffer(starts[-1])
        exporter = buffer[:]  # lives as long as a tensor in it
        weakref.finalize(exporter, self._release, buffer).atexit = False
        parts = [memoryview(exporter)[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        return [torch.frombuffer(part, dtype=torch.uint8) for part in parts]

    def free_and_stop_pooling(self) -> None:
        """Free the unused buffers, and keep no more buffers from now on."""
        with self._lock:
            self._kept = 0
            self._unused.clear()

    def _take_buffer(self, size: int) -> Buffer:
        """Return an unused buffer that fits, or a new one."""
        with self._lock:
            fitting = [buffer for buffer in self._unused if size <= buffer.size <= 2 * max(size, MIN_BUFFER_SIZE)]
            if not fitting:  # the size of the state has changed: no unused buffer will fit again
                self._unused.clear()
                return self._allocate(max(size, MIN_BUFFER_SIZE))
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


@attrs.frozen
class Copy:
    """Planned copy of a tensor into a CPU tensor with the same shape and dtype."""

    source: Tensor
    target: Tensor

    def copy_tensor(self, *, non_blocking: bool = False) -> None:
        """Copy the tensor; `non_blocking` only enqueues a copy from a GPU on the current stream."""
        self.target.copy_(self.source, non_blocking=non_blocking)


def plan_copies(state: NodeState, pool: Pool) -> tuple[dict[str, Any], list[Copy]]:
    """
    Return a state dict's copy with uninitialized CPU tensors, and the copies that fill them.

    Plain values and containers are already copied. Any other value raises TypeError with its path.
    """
    copies: dict[Any, Copy] = {}  # memory is allocated for all of them together, after the walk

    def copy_value_or_plan_tensor(path: tuple[Any, ...], value: Any) -> Any:
        if isinstance(value, Tensor):
            return _plan_tensor_copy(path, value, copies)
        if isinstance(value, PLAIN):
            return value
        raise TypeError(f"{'/'.join(map(str, path))} is a {type(value).__name__}, which can't be staged")

    staged = map_leaves_with_path(copy_value_or_plan_tensor, state)
    filled = [planned for planned in copies.values() if planned.target.nbytes]
    memories = pool.allocate_tensors([planned.target.nbytes for planned in filled])
    for target, memory in zip((planned.target for planned in filled), memories, strict=True):
        target.set_(memory.untyped_storage(), 0, target.shape, target.stride())
    return staged, filled


def _plan_tensor_copy(path: tuple[Any, ...], tensor: Tensor, copies: dict[Any, Copy]) -> Any:
    """
    Return a tensor's copy, without memory, and add it to `copies`, by its memory.

    A wrapper subclass such as DTensor is rebuilt around the copies of its parts.
    """
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(tensor, name) for name in names}
        parts = {
            name: _plan_tensor_copy(path, part, copies) if isinstance(part, Tensor) else part
            for name, part in inner.items()
        }
        wrap = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
        return wrap(parts, context, tensor.size(), tensor.stride())
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        kind = f"a {tensor.layout} tensor on {tensor.device}"
        raise TypeError(f"{'/'.join(map(str, path))} is {kind}, which can't be staged; save a dense tensor with data")
    memory = (tensor.device, tensor.data_ptr()) if tensor.numel() else None
    key = memory, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()
    if key not in copies:
        # without memory until the walk is over, but with the shape and strides that a wrapper needs
        target = torch.empty_like(tensor.detach(), device="cpu")
        target.untyped_storage().resize_(0)
        copies[key] = Copy(tensor.detach(), target)
    return copies[key].target
