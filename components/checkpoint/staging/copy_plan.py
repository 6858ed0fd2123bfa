"""
Allocates CPU memory for a copy of a state dict, which the next copy can use again, and lists the copies to make.

Tensors that share memory share it in the copy too: overlapping tensors are copied as the range of the storage that they
cover. If they are a small part of that range, such as one column of a large matrix, each is copied separately.
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

from drawloom.components.state.trees import transform_with_path
from drawloom.graph import UserError

SPARSE = 2  # a range of more than this many times the bytes of its tensors is not copied as a whole
WIDEST = 16  # bytes of the widest element: ranges begin at multiples of it

PLAIN = (bool, int, float, complex, str, bytes, type(None))

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


@attrs.frozen
class Copy:
    """A copy to make: from a tensor to one of the same shape and dtype on the CPU."""

    source: Tensor
    target: Tensor

    @property
    def bytes(self) -> int:
        """The size of the copy."""
        return self.target.nbytes

    def make(self, *, non_blocking: bool = False) -> None:
        """Copy; `non_blocking` only enqueues a copy from a GPU on the current stream."""
        self.target.copy_(self.source, non_blocking=non_blocking)


def plan_copies(state: dict[str, Any], pool: Pool, *, type_check: bool = True) -> tuple[dict[str, Any], list[Copy]]:
    """
    A copy of a state dict with new, uninitialized CPU tensors, and the copies that fill them.

    Plain values and containers are copied already. Tensors are contiguous, unless they overlap others. Any other value
    raises TypeError with its path or, without `type_check`, is deep-copied.
    """

    wanted: dict[Any, Copy] = {}  # each once: memory is allocated for all of them together, after the walk

    def copy_of(tensor: Tensor) -> Tensor:
        if (key := _key(tensor)) not in wanted:
            # Without memory until the walk is over: a wrapper around it needs shape and strides already.
            target = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
            target.untyped_storage().resize_(0)
            wanted[key] = Copy(tensor, target)
        return wanted[key].target

    staged = transform_with_path(lambda path, value: _staged(path, value, copy_of, type_check), state)
    return staged, _allocate([*wanted.values()], pool)


def _staged(path: tuple[Any, ...], value: Any, copy_of: Callable[[Tensor], Tensor], type_check: bool) -> Any:
    """The copy of a leaf, with `copy_of` for tensors that have a storage."""
    if isinstance(value, Tensor):
        return _like(path, value, copy_of)
    if isinstance(value, PLAIN):
        return value
    if type_check:
        raise TypeError(f"{'/'.join(map(str, path))} is a {type(value).__name__}, which can't be staged")
    return copy.deepcopy(value)


def _key(tensor: Tensor) -> Any:
    """A key that is equal for views of the same memory with the same shape, strides and dtype."""
    memory = (tensor.device, tensor.data_ptr()) if tensor.numel() else None
    return memory, tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def _like(path: tuple[Any, ...], tensor: Tensor, copy_of: Callable[[Tensor], Tensor]) -> Any:
    """The copy of a tensor; for a wrapper subclass such as DTensor, one around the copies of its parts."""
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        found = {name: getattr(tensor, name) for name in names}
        parts = {name: _like(path, part, copy_of) if isinstance(part, Tensor) else part for name, part in found.items()}
        wrap = type(tensor).__tensor_unflatten__  # type: ignore[attr-defined]
        return wrap(parts, context, tensor.size(), tensor.stride())
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        what = f"a {tensor.layout} tensor on {tensor.device}"
        raise TypeError(f"{'/'.join(map(str, path))} is {what}, which can't be staged")
    return copy_of(tensor.detach())


@attrs.define
class _StorageRange:
    """A byte range of a storage, from `start` to `end`, and the copies of tensors in it."""

    start: int
    end: int
    members: list[Copy]

    def is_dense(self) -> bool:
        """Whether to copy the range as a whole instead of tensor by tensor."""
        # conjugate and negative views are lazy: copying bytes would lose the conjugation or the sign
        lazy = any(member.source.is_conj() or member.source.is_neg() for member in self.members)
        return not lazy and self.end - self.start <= SPARSE * sum(member.source.nbytes for member in self.members)

    def source(self) -> Tensor:
        """The range as a uint8 tensor, (end - start,)."""
        first = self.members[0].source
        flat = torch.empty(0, dtype=torch.uint8, device=first.device)
        return flat.set_(first.untyped_storage(), self.start, (self.end - self.start,), (1,))


def _allocate(wanted: Sequence[Copy], pool: Pool) -> list[Copy]:
    """Give the targets of copies memory; the copies to make, of whole ranges of storages where they are dense."""
    ranges = list(_ranges([member for member in wanted if member.source.numel()]))
    whole = [extent for extent in ranges if extent.is_dense()]
    single = [member for extent in ranges if not extent.is_dense() for member in extent.members]
    sizes = [*(extent.end - extent.start for extent in whole), *(member.bytes for member in single)]
    memory = pool.tensors(sizes)
    for member, target in zip(single, memory[len(whole) :], strict=True):
        dense = target.view(member.source.dtype).view(member.source.shape)
        member.target.set_(target.untyped_storage(), 0, dense.shape, dense.stride())
    for extent, target in zip(whole, memory, strict=False):
        for member in extent.members:
            offset = int(member.source.storage_offset()) - extent.start // member.source.itemsize
            member.target.set_(target.untyped_storage(), offset, member.source.shape, member.source.stride())
    return [*map(Copy, map(_StorageRange.source, whole), memory), *single]


def _ranges(wanted: Sequence[Copy]) -> Iterator[_StorageRange]:
    """The ranges of storages that overlapping tensors cover."""
    by_storage: dict[Any, list[_StorageRange]] = {}
    for each in wanted:
        key = each.source.device, each.source.untyped_storage().data_ptr()
        by_storage.setdefault(key, []).append(_extent(each))
    for ranges in by_storage.values():
        last, *others = sorted(ranges, key=lambda extent: (extent.start, extent.end))
        for extent in others:
            if extent.start < last.end:
                last.end, last.members = max(last.end, extent.end), last.members + extent.members
            else:
                yield last
                last = extent
        yield last


def _extent(wanted: Copy) -> _StorageRange:
    """The range from a tensor's first element to its last."""
    tensor = wanted.source
    start = int(tensor.storage_offset()) * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return _StorageRange(start // WIDEST * WIDEST, start + int(last + 1) * tensor.itemsize, [wanted])
