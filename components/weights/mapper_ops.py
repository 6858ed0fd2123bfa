"""The smallest mappers: one thing done to some tensors. Whatever is longer is composed of them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drawloom.components.ports.weights import Mapper, TensorGroup
from drawloom.components.weights.mapper import parallel, same


def identity(*names: str) -> Mapper:
    """Each tensor under its own name."""
    return rename({name: name for name in names})


def rename(table: Mapping[str, str]) -> Mapper:
    """Each tensor under another name: old name to new name."""
    return parallel(*(Mapper((TensorGroup((old,), (new,), same, same),)) for old, new in table.items()))


def rename_by_pattern(names: Iterable[str], pattern: str, replacement: str) -> Mapper:
    r"""Each name that matches a regular expression as a whole under another (`\1` is its first group), others as is."""
    expression = re.compile(pattern)
    matches = {name: expression.fullmatch(name) for name in names}
    return rename({name: match.expand(replacement) if match else name for name, match in matches.items()})


def select_child(names: Iterable[str], parent: str) -> Mapper:
    """Of all names, those inside the child module `parent`, under the names that they have there."""
    start = f"{parent}."
    return rename({name: name.removeprefix(start) for name in names if name.startswith(start)})


def transpose(name: str, first: int, second: int) -> Mapper:
    """A tensor with two dimensions swapped."""

    def swap(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.transpose(first, second) for tensor in tensors]

    return Mapper((TensorGroup((name,), (name,), swap, swap),))


def squeeze(name: str, dim: int) -> Mapper:
    """A tensor without a dimension of size 1."""
    return unsqueeze(name, dim).inverse()


def unsqueeze(name: str, dim: int) -> Mapper:
    """A tensor with a new dimension of size 1, which is its `dim`-th then."""

    def add(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.unsqueeze(dim) for tensor in tensors]

    def remove(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [_one(tensor, dim) for tensor in tensors]

    return Mapper((TensorGroup((name,), (name,), add, remove),))


def stack(names: Sequence[str], target: str, dim: int = 0) -> Mapper:
    """Tensors of one shape as one tensor, along a new dimension."""

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.stack(list(tensors), dim)]

    def part(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if tensors[0].size(dim) != len(names):
            raise ValueError(f"dimension {dim} has size {tensors[0].size(dim)}, not {len(names)}")
        return tensors[0].unbind(dim)

    return Mapper((TensorGroup(tuple(names), (target,), join, part),))


def unstack(name: str, targets: Sequence[str], dim: int = 0) -> Mapper:
    """A tensor's slices along a dimension, each under a name of its own."""
    return stack(targets, name, dim).inverse()


def concatenate(names: Sequence[str], target: str, dim: int = 0, sizes: Sequence[int] | None = None) -> Mapper:
    """Tensors laid end to end along a dimension, in which they have these sizes; all the same if left out."""

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        joined = torch.cat(list(tensors), dim)
        if [tensor.size(dim) for tensor in tensors] != _sizes(joined, dim, len(names), sizes):
            found = [tensor.size(dim) for tensor in tensors]
            raise ValueError(f"dimension {dim} has the sizes {found}, not {sizes or 'all the same'}")
        return [joined]

    def part(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return torch.split(tensors[0], _sizes(tensors[0], dim, len(names), sizes), dim)

    return Mapper((TensorGroup(tuple(names), (target,), join, part),))


def chunk(name: str, targets: Sequence[str], dim: int = 0, sizes: Sequence[int] | None = None) -> Mapper:
    """A tensor cut along a dimension into pieces of these sizes, or of one size, each under a name of its own."""
    return concatenate(targets, name, dim, sizes).inverse()


def _one(tensor: Tensor, dim: int) -> Tensor:
    if tensor.size(dim) != 1:
        raise ValueError(f"dimension {dim} has size {tensor.size(dim)}, not 1")
    return tensor.squeeze(dim)


def _sizes(whole: Tensor, dim: int, count: int, sizes: Sequence[int] | None) -> list[int]:
    """The sizes of the pieces of a tensor."""
    length = whole.size(dim)
    wanted = [length // count] * count if sizes is None else list(sizes)
    if sum(wanted) != length:
        pieces = f"{count} of one size" if sizes is None else f"pieces of sizes {wanted}"
        raise ValueError(f"dimension {dim} has size {length}, which can't be cut into {pieces}")
    return wanted


def distribute(name: str, mesh: Any, placements: Sequence[Any]) -> Mapper:
    """A tensor that every rank holds whole, as a DTensor of each rank's part; no rank sends anything."""

    def spread(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        from torch.distributed.tensor import distribute_tensor

        return [distribute_tensor(tensor, mesh, list(placements), src_data_rank=None) for tensor in tensors]

    return Mapper((TensorGroup((name,), (name,), spread, _whole),))


def gather(name: str) -> Mapper:
    """A DTensor as a whole tensor, on every rank of its mesh, which all take part; one that is whole stays as it is."""
    return Mapper((TensorGroup((name,), (name,), _whole),))


def like(name: str, tensor: Tensor) -> Mapper:
    """A whole tensor spread as this one is, or left whole as this one is."""
    if is_sharded(tensor):
        return distribute(name, tensor.device_mesh, tensor.placements)  # type: ignore[attr-defined]
    return Mapper((TensorGroup((name,), (name,), same, same),))


def is_sharded(tensor: Tensor) -> bool:
    """Whether this is a DTensor."""
    return hasattr(tensor, "placements")


def _whole(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    return [tensor.full_tensor() if is_sharded(tensor) else tensor for tensor in tensors]  # type: ignore[attr-defined]
