"""Elementary mappers: rename, reshape, stack, concatenate, distribute. Other mappers are composed of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from drawloom.components.weights.mapper import parallel, return_unchanged
from drawloom.ports import Mapper, TensorGroup, TensorSlice, is_dtensor


def identity(*names: str) -> Mapper:
    """Keep tensors, any shape, under their names."""
    return rename({name: name for name in names})


def rename(table: Mapping[str, str]) -> Mapper:
    """Rename tensors, any shape, from old name to new name."""
    return parallel(
        *(Mapper((TensorGroup((old,), (new,), return_unchanged, return_unchanged),)) for old, new in table.items())
    )


def transpose(name: str, first: int, second: int) -> Mapper:
    """Swap two dimensions: (..., first, ..., second, ...) to (..., second, ..., first, ...)."""

    def swap(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.transpose(first, second) for tensor in tensors]

    return Mapper((TensorGroup((name,), (name,), swap, swap),))


def squeeze(name: str, dim: int) -> Mapper:
    """Remove dimension `dim`, which has size 1. Raises ValueError for another size."""
    return unsqueeze(name, dim).inverse()


def unsqueeze(name: str, dim: int) -> Mapper:
    """Insert a dimension with size 1 at `dim`."""

    def add(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.unsqueeze(dim) for tensor in tensors]

    def remove(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [_squeeze_dim(tensor, dim) for tensor in tensors]

    return Mapper((TensorGroup((name,), (name,), add, remove),))


def stack(names: Sequence[str], target: str, dim: int = 0) -> Mapper:
    """Stack equally shaped tensors along a new dimension `dim`: n tensors (...) to one (n, ...) for dim 0."""

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [torch.stack(list(tensors), dim)]

    def separate(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if tensors[0].size(dim) != len(names):
            raise ValueError(f"dimension {dim} has size {tensors[0].size(dim)}, not {len(names)}")
        return tensors[0].unbind(dim)

    return Mapper((TensorGroup(tuple(names), (target,), join, separate),))


def unstack(name: str, targets: Sequence[str], dim: int = 0) -> Mapper:
    """Split a tensor into its slices along a dimension: one (n, ...) to n tensors (...) for dim 0."""
    return stack(targets, name, dim).inverse()


def concatenate(names: Sequence[str], target: str, dim: int = 0, sizes: Sequence[int] | None = None) -> Mapper:
    """Concatenate tensors along `dim`, where they have these sizes; default: equal sizes."""

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        joined = torch.cat(list(tensors), dim)
        if [tensor.size(dim) for tensor in tensors] != _compute_piece_sizes(joined, dim, len(names), sizes):
            actual = [tensor.size(dim) for tensor in tensors]
            raise ValueError(f"dimension {dim} has sizes {actual}, but needs {sizes or 'equal ones'}")
        return [joined]

    def separate(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return torch.split(tensors[0], _compute_piece_sizes(tensors[0], dim, len(names), sizes), dim)

    return Mapper((TensorGroup(tuple(names), (target,), join, separate),))


def concatenate_blocks(names: Sequence[str], target: str, blocks: int, sizes: Sequence[int], dim: int = 0) -> Mapper:
    """
    Concatenate tensors block by block: the first blocks of all tensors, then the second blocks, and so on.

    Each tensor (..., blocks * size, ...) has `blocks` blocks along `dim`, as long as its entry in `sizes`.
    """

    def join(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        by_block = [tensor.unflatten(dim, (blocks, -1)) for tensor in tensors]  # type: ignore[no-untyped-call]
        return [torch.cat(by_block, dim + 1).flatten(dim, dim + 1)]

    def separate(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        if (length := tensors[0].size(dim)) != (total := blocks * sum(sizes)):
            raise ValueError(f"dimension {dim} has size {length}, not {total}")
        by_block = tensors[0].unflatten(dim, (blocks, -1))  # type: ignore[no-untyped-call]
        return [piece.flatten(dim, dim + 1) for piece in torch.split(by_block, list(sizes), dim + 1)]

    return Mapper((TensorGroup(tuple(names), (target,), join, separate),))


def chunk(name: str, targets: Sequence[str], dim: int = 0, sizes: Sequence[int] | None = None) -> Mapper:
    """Split a tensor along `dim` into pieces with these sizes, or with equal sizes."""
    return concatenate(targets, name, dim, sizes).inverse()


def _squeeze_dim(tensor: Tensor, dim: int) -> Tensor:
    """Remove dimension `dim`. Raises ValueError if its size is not 1."""
    if tensor.size(dim) != 1:
        raise ValueError(f"dimension {dim} has size {tensor.size(dim)}, not 1")
    return tensor.squeeze(dim)


def _compute_piece_sizes(whole: Tensor, dim: int, count: int, sizes: Sequence[int] | None) -> list[int]:
    """Return `sizes`, or `count` equal ones. Raises ValueError if their sum is not the tensor's size along `dim`."""
    length = whole.size(dim)
    piece_sizes = [length // count] * count if sizes is None else list(sizes)
    if sum(piece_sizes) != length:
        pieces = f"{count} of one size" if sizes is None else f"pieces of sizes {piece_sizes}"
        raise ValueError(f"dimension {dim} has size {length}, which can't be cut into {pieces}")
    return piece_sizes


def cut_slice(name: str, tensor_slice: TensorSlice) -> Mapper:
    """Slice a tensor with shape `tensor_slice.shape`, as a view; without an inverse."""

    def take_slice(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensors[0][tensor_slice.index()]]

    return Mapper((TensorGroup((name,), (name,), take_slice),))


def to_dtype(name: str, dtype: torch.dtype) -> Mapper:
    """Cast a floating-point tensor, any shape; without an inverse."""

    def cast(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        return [tensor.to(dtype) if tensor.is_floating_point() else tensor for tensor in tensors]

    return Mapper((TensorGroup((name,), (name,), cast),))


def distribute_like(name: str, tensor: Tensor) -> Mapper:
    """
    Turn a tensor that is whole on every rank into a DTensor like `tensor` (any shape), without communication; keep it
    if `tensor` is not a DTensor.
    """

    def distribute(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        # imported here, because the import takes a second, and most runs shard nothing
        from torch.distributed.tensor import distribute_tensor

        like: Any = tensor
        return [distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None) for whole in tensors]

    return Mapper((TensorGroup((name,), (name,), distribute if is_dtensor(tensor) else return_unchanged),))
