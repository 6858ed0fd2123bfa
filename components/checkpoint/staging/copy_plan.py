"""
Copy plans for state dicts, with CPU memory that the next copy can reuse.

Tensors with shared memory also share it in the copy: overlapping tensors are copied as the storage range under them.
If they are a small part of the range, such as one column in a large matrix, they are copied separately.
"""

import copy
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom import UserError
from drawloom.components.state.trees import map_leaves_with_path
from drawloom.ports import NodeState

MAX_RANGE_RATIO = 2  # a range is copied as a whole up to this many times the bytes of its tensors
RANGE_ALIGNMENT = 16  # bytes; the size of the widest element

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

    @property
    def bytes(self) -> int:
        """The copy's size."""
        return self.target.nbytes

    def copy_tensor(self, *, non_blocking: bool = False) -> None:
        """Copy the tensor; `non_blocking` only enqueues a copy from a GPU on the current stream."""
        self.target.copy_(self.source, non_blocking=non_blocking)


def plan_copies(state: NodeState, pool: Pool, *, type_check: bool = True) -> tuple[dict[str, Any], list[Copy]]:
    """
    Return a state dict's copy with uninitialized CPU tensors, and the copies that fill them.

    Plain values and containers are already copied. Tensors are contiguous, unless they overlap others. Any other
    value raises TypeError with its path, or is deep-copied without `type_check`.
    """

    copies: dict[Any, Copy] = {}  # memory is allocated for all of them together, after the walk

    def plan_copy(tensor: Tensor) -> Tensor:
        if (key := _memory_key(tensor)) not in copies:
            # without memory until the walk is over, but with the shape and strides that a wrapper needs
            target = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            target.untyped_storage().resize_(0)
            copies[key] = Copy(tensor, target)
        return copies[key].target

    staged = map_leaves_with_path(
        lambda path, value: _copy_value_or_plan_tensor(path, value, plan_copy, type_check), state
    )
    return staged, _allocate_targets_and_merge_copies([*copies.values()], pool)


def _copy_value_or_plan_tensor(
    path: tuple[Any, ...], value: Any, plan_copy: Callable[[Tensor], Tensor], type_check: bool
) -> Any:
    """Copy a leaf, with `plan_copy` for tensors with a storage."""
    if isinstance(value, Tensor):
        return _plan_tensor_copy(path, value, plan_copy)
    if isinstance(value, PLAIN):
        return value
    if type_check:
        raise TypeError(f"{'/'.join(map(str, path))} is a {type(value).__name__}, which can't be staged")
    return copy.deepcopy(value)


def _memory_key(tensor: Tensor) -> Any:
    """Return an equal key for views on the same memory with the same shape, strides and dtype."""
    memory = (tensor.device, tensor.data_ptr()) if tensor.numel() else None
    return memory, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _plan_tensor_copy(path: tuple[Any, ...], tensor: Tensor, plan_copy: Callable[[Tensor], Tensor]) -> Any:
    """Copy a tensor; a wrapper subclass such as DTensor is rebuilt around the copies of its parts."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: getattr(tensor, name) for name in names}
        parts = {
            name: _plan_tensor_copy(path, part, plan_copy) if isinstance(part, Tensor) else part
            for name, part in inner.items()
        }
        wrap = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
        return wrap(parts, context, tensor.size(), tensor.stride())
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        kind = f"a {tensor.layout} tensor on {tensor.device}"
        raise TypeError(f"{'/'.join(map(str, path))} is {kind}, which can't be staged; save a dense tensor with data")
    return plan_copy(tensor.detach())


@attrs.define
class _StorageRange:
    """Byte range in a storage, from `start` to `end`, with the planned copies in it."""

    start: int
    end: int
    members: list[Copy]

    def should_copy_whole(self) -> bool:
        """Return whether to copy the range as a whole instead of tensor by tensor."""
        # copying the bytes of lazy conjugate and negative views would lose the conjugation or the sign
        lazy = any(member.source.is_conj() or member.source.is_neg() for member in self.members)
        return not lazy and self.end - self.start <= MAX_RANGE_RATIO * sum(
            member.source.nbytes for member in self.members
        )

    def source(self) -> Tensor:
        """Return the range as a uint8 tensor, (end - start,)."""
        first = self.members[0].source
        flat = torch.empty(0, dtype=torch.uint8, device=first.device)
        return flat.set_(first.untyped_storage(), self.start, (self.end - self.start,), (1,))


def _allocate_targets_and_merge_copies(copies: Sequence[Copy], pool: Pool) -> list[Copy]:
    """Allocate targets for copies; return the copies to make, with one copy per dense storage range."""
    ranges = list(_merge_ranges([member for member in copies if member.source.numel()]))
    whole = [extent for extent in ranges if extent.should_copy_whole()]
    single = [member for extent in ranges if not extent.should_copy_whole() for member in extent.members]
    sizes = [*(extent.end - extent.start for extent in whole), *(member.bytes for member in single)]
    memory = pool.allocate_tensors(sizes)
    for member, target in zip(single, memory[len(whole) :], strict=True):
        dense = target.view(member.source.dtype).view(member.source.shape)
        member.target.set_(target.untyped_storage(), 0, dense.shape, dense.stride())
    for extent, target in zip(whole, memory, strict=False):
        for member in extent.members:
            offset = int(member.source.storage_offset()) - extent.start // member.source.itemsize
            member.target.set_(target.untyped_storage(), offset, member.source.shape, member.source.stride())
    return [*map(Copy, map(_StorageRange.source, whole), memory), *single]


def _merge_ranges(copies: Sequence[Copy]) -> Iterator[_StorageRange]:
    """Yield disjoint storage ranges: tensors with overlapping memory share one."""
    by_storage: dict[Any, list[_StorageRange]] = {}
    for member in copies:
        key = member.source.device, member.source.untyped_storage().data_ptr()
        by_storage.setdefault(key, []).append(_storage_range_of(member))
    for ranges in by_storage.values():
        last, *others = sorted(ranges, key=lambda extent: (extent.start, extent.end))
        for extent in others:
            if extent.start < last.end:
                last.end, last.members = max(last.end, extent.end), last.members + extent.members
            else:
                yield last
                last = extent
        yield last


def _storage_range_of(member: Copy) -> _StorageRange:
    """Return the bytes in its storage from a tensor's first element to its last, the start rounded down."""
    tensor = member.source
    start = int(tensor.storage_offset()) * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _StorageRange(start // RANGE_ALIGNMENT * RANGE_ALIGNMENT, start + int(last + 1) * tensor.itemsize, [member])
