"""
A state with room for a copy of its tensors, and what has to be copied where.

Tensors that share memory share it in the copy too: what is copied is the stretch of a storage that overlapping tensors
cover together. Where they are a small part of that stretch, such as one column of a large table, each is copied
by itself.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.components.checkpoint.staging.pinned_pool import Pool, aligned

SPARSE = 2  # a stretch with more bytes than so many times those of its tensors is not copied as a whole
WIDEST = 16  # bytes of the widest element: where a stretch may begin

PLAIN = (bool, int, float, complex, str, bytes, type(None))


@attrs.frozen
class Copy:
    """Numbers on their way: from a tensor to one of the same shape, which is on the CPU."""

    source: Tensor
    target: Tensor

    @property
    def bytes(self) -> int:
        return self.target.nbytes

    def make(self, *, non_blocking: bool = False) -> None:
        """Copy them; from a GPU `non_blocking` only begins to."""
        self.target.copy_(self.source, non_blocking=non_blocking)


def plan_copies(state: dict[str, Any], pool: Pool, *, type_check: bool = True) -> tuple[dict[str, Any], list[Copy]]:
    """
    A state like this one with new tensors on the CPU, dense unless they are tied, and what to copy into them.

    Plain values and containers are copied already. Anything else is refused with a TypeError that says where it is,
    or, without `type_check`, copied as Python copies objects.
    """
    tensors: list[Tensor] = []
    copied = _each(state, (), lambda tensor: _TensorSlot(_collect(tensors, tensor)), type_check)
    staged, copies = _stage(tensors, pool)
    return _fill(copied, staged), copies


def _collect(tensors: list[Tensor], tensor: Tensor) -> int:
    tensors.append(tensor)
    return len(tensors) - 1


@attrs.frozen
class _TensorSlot:
    """Stands where a tensor will be."""

    number: int


@attrs.frozen
class _Wrapper:
    """Stands where a tensor will be that is made of others, such as a shard of a distributed one."""

    kind: type
    parts: dict[str, Any]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]


def _each(value: Any, path: tuple[str, ...], leaf: Callable[[Tensor], _TensorSlot], type_check: bool) -> Any:
    if isinstance(value, Tensor):
        return _tensor(value, path, leaf)
    if isinstance(value, dict):
        return {key: _each(part, (*path, str(key)), leaf, type_check) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_each(part, (*path, str(place)), leaf, type_check) for place, part in enumerate(value))
    if type(value) in PLAIN:
        return value
    if type_check:
        raise TypeError(f"{'/'.join(path)} is a {type(value).__name__}, which can't be staged")
    return copy.deepcopy(value)


def _tensor(tensor: Tensor, path: tuple[str, ...], leaf: Callable[[Tensor], _TensorSlot]) -> Any:
    if hasattr(type(tensor), "__tensor_flatten__"):
        names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        found = {name: getattr(tensor, name) for name in names}
        parts = {name: _tensor(part, path, leaf) if isinstance(part, Tensor) else part for name, part in found.items()}
        return _Wrapper(type(tensor), parts, context, tensor.size(), tensor.stride())
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise TypeError(f"{'/'.join(path)} is a {tensor.layout} tensor on {tensor.device}, which can't be staged")
    return leaf(tensor.detach().resolve_conj().resolve_neg())


def _fill(value: Any, staged: list[Tensor]) -> Any:
    if isinstance(value, _TensorSlot):
        return staged[value.number]
    if isinstance(value, _Wrapper):
        parts = {name: _fill(part, staged) for name, part in value.parts.items()}
        made = value.kind.__tensor_unflatten__  # type: ignore[attr-defined]
        return made(parts, value.context, value.size, value.stride)
    if isinstance(value, dict):
        return {key: _fill(part, staged) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_fill(part, staged) for part in value)
    return value


@attrs.define
class _StorageRange:
    """Bytes of a storage, from `start` to `end`, and the tensors that lie there, by their numbers."""

    start: int
    end: int
    members: list[int]


def _stage(tensors: list[Tensor], pool: Pool) -> tuple[list[Tensor], list[Copy]]:
    staged = [torch.empty(each.shape if not each.numel() else 0, dtype=each.dtype) for each in tensors]
    whole, single = _plan(tensors)
    sizes = [*(each.end - each.start for each in whole), *(tensors[group[0]].nbytes for group in single)]
    copies: list[Copy] = []
    with pool.lease(sum(map(aligned, sizes))) as lease:
        for stretch in whole:
            target = lease.part(stretch.end - stretch.start)
            copies.append(Copy(_bytes(tensors[stretch.members[0]], stretch), target))
            for number in stretch.members:
                staged[number] = _inside(tensors[number], stretch, target)
        for group in single:
            first = tensors[group[0]]
            dense = lease.part(first.nbytes).view(first.dtype).view(first.shape)
            copies.append(Copy(first, dense))
            for number in group:
                staged[number] = dense
    return staged, copies


def _plan(tensors: list[Tensor]) -> tuple[list[_StorageRange], list[list[int]]]:
    """Stretches that are copied as a whole, and groups of equal tensors of which one is copied by itself."""
    whole: list[_StorageRange] = []
    single: list[list[int]] = []
    for stretch in _stretches(tensors):
        groups = _equal(stretch.members, tensors)
        if stretch.end - stretch.start <= SPARSE * sum(tensors[group[0]].nbytes for group in groups):
            whole.append(stretch)
        else:
            single += groups
    return whole, single


def _stretches(tensors: list[Tensor]) -> Iterator[_StorageRange]:
    by_storage: dict[tuple[str, int], list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.numel():
            key = str(tensor.device), tensor.untyped_storage().data_ptr()
            by_storage.setdefault(key, []).append(number)
    for numbers in by_storage.values():
        yield from _merged(_StorageRange(*_extent(tensors[number]), [number]) for number in numbers)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between which a tensor lies."""
    start = int(tensor.storage_offset()) * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start // WIDEST * WIDEST, start + int(last + 1) * tensor.itemsize


def _merged(stretches: Iterable[_StorageRange]) -> Iterator[_StorageRange]:
    ordered = sorted(stretches, key=lambda each: (each.start, each.end))
    last = ordered[0]
    for each in ordered[1:]:
        if each.start < last.end:
            last.end, last.members = max(last.end, each.end), last.members + each.members
        else:
            yield last
            last = each
    yield last


def _equal(numbers: list[int], tensors: list[Tensor]) -> list[list[int]]:
    groups: dict[Any, list[int]] = {}
    for number in numbers:
        tensor = tensors[number]
        key = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        groups.setdefault(key, []).append(number)
    return list(groups.values())


def _bytes(tensor: Tensor, stretch: _StorageRange) -> Tensor:
    """A stretch of a tensor's storage."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), stretch.start, (stretch.end - stretch.start,), (1,))


def _inside(tensor: Tensor, stretch: _StorageRange, copied: Tensor) -> Tensor:
    """Where a tensor lies in the copy of its stretch."""
    offset = (tensor.storage_offset() * tensor.itemsize - stretch.start) // tensor.itemsize
    like = torch.empty(0, dtype=tensor.dtype)
    return like.set_(copied.untyped_storage(), offset, tensor.shape, tensor.stride())
