"""
Combinations of mappers: parallel, sequential, sharded over workers, and with prefixes.

They are composed of elementary mappers: rename, reshape, stack, concatenate, distribute.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.ports import Mapper, TensorGroup, TensorSlice, is_dtensor


def return_unchanged(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return tensors, any shape, unchanged and without a copy."""
    return tensors


def parallel(*mappers: Mapper) -> Mapper:
    """Combine all mappers' groups. Raises ValueError if two mappers share an input or an output."""
    merged = Mapper(tuple(group for mapper in mappers for group in mapper.groups))
    for role, names in (("an input", merged.inputs), ("an output", merged.outputs)):
        if duplicates := [name for name, count in Counter(names).items() if count > 1]:
            raise ValueError(f"{', '.join(duplicates)} would be {role} of more than one parallel mapper")
    return merged


def sequential(*mappers: Mapper) -> Mapper:
    """
    Apply mappers one after another; a mapper passes on other tensors than its inputs unchanged.

    A later mapper's inputs are inputs of the chain if no earlier mapper outputs them; an earlier mapper's outputs are
    outputs of the chain if no later mapper consumes them. Groups with shared tensors become one group. Raises
    ValueError if a passed-on tensor has the name of a mapper's input or output.
    """
    stages = [mapper for mapper in mappers if mapper.groups]
    if not stages:
        return Mapper(())
    return Mapper(
        tuple(
            _combine_into_one_group(parts)
            for parts in _find_connected_groups(_extend_each_mapper_by_identities(stages))
        )
    )


def select_outputs(mapper: Mapper, names: Collection[str]) -> Mapper:
    """Return the groups with at least one output among the names."""
    wanted = frozenset(names)
    return Mapper(tuple(group for group in mapper.groups if not wanted.isdisjoint(group.outputs)))


def _extend_each_mapper_by_identities(mappers: Sequence[Mapper]) -> list[Mapper]:
    """Add identities to the mappers, so that every mapper's inputs are exactly the previous mapper's outputs."""
    stages = list(mappers)
    for index in range(len(stages) - 1, 0, -1):  # inputs of later mappers pass earlier ones
        outputs = set(stages[index - 1].outputs)
        stages[index - 1] = _extend_by_identities(
            stages[index - 1], [n for n in stages[index].inputs if n not in outputs]
        )
    for index in range(1, len(stages)):  # outputs of earlier mappers pass later ones
        inputs = set(stages[index].inputs)
        stages[index] = _extend_by_identities(stages[index], [n for n in stages[index - 1].outputs if n not in inputs])
    return stages


def _extend_by_identities(mapper: Mapper, names: Iterable[str]) -> Mapper:
    """
    Add groups to a mapper that return the named tensors unchanged. Raises ValueError if it already has one of the
    names.
    """
    passing = Mapper(tuple(TensorGroup((name,), (name,), return_unchanged, return_unchanged) for name in names))
    try:
        return parallel(mapper, passing)
    except ValueError as error:
        raise ValueError(f"sequential mappers can't pass a tensor on unchanged: {error}") from error


def _find_connected_groups(stages: Sequence[Mapper]) -> Iterator[list[list[TensorGroup]]]:
    """Yield connected components among all stages' groups, ordered by their first groups."""
    groups = [(index, group) for index, stage in enumerate(stages) for group in stage.groups]
    forest = _Forest(len(groups))
    producers = {(index, name): number for number, (index, group) in enumerate(groups) for name in group.outputs}
    for number, (index, group) in enumerate(groups):
        for name in group.inputs if index else ():
            forest.merge_sets(producers[index - 1, name], number)
    trees: dict[int, list[list[TensorGroup]]] = {}
    for number, (index, group) in enumerate(groups):
        trees.setdefault(forest.find_root(number), [[] for _ in stages])[index].append(group)
    yield from trees.values()


class _Forest:
    """Union-find: disjoint sets over the numbers from 0 to `count` - 1."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def find_root(self, number: int) -> int:
        """Return the representative for a number's set."""
        while (parent := self._parents[number]) != number:
            self._parents[number] = self._parents[parent]  # path halving
            number = parent
        return number

    def merge_sets(self, first: int, second: int) -> None:
        """Merge two numbers' sets."""
        # the lower root wins, so that the result does not depend on the order of joins
        low, high = sorted((self.find_root(first), self.find_root(second)))
        self._parents[high] = low


def _combine_into_one_group(stages: Sequence[Sequence[TensorGroup]]) -> TensorGroup:
    """Combine connected groups from several stages into one group."""
    forth = _StagedConversion(tuple(tuple(stage) for stage in stages))
    if any(group.revert is None for stage in stages for group in stage):
        return TensorGroup(forth.inputs, forth.outputs, forth)
    back = _StagedConversion(tuple(tuple(group.inverse() for group in stage) for stage in reversed(stages)))
    return TensorGroup(forth.inputs, forth.outputs, forth, back)


@attrs.frozen
class _StagedConversion:
    """Function that converts tensors stage by stage, group by group; it frees a tensor as soon as it is consumed."""

    stages: tuple[tuple[TensorGroup, ...], ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(name for group in self.stages[0] for name in group.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(name for group in self.stages[-1] for name in group.outputs)

    def __call__(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        state = dict(zip(self.inputs, tensors, strict=True))
        for stage in self.stages:
            outputs: dict[str, Tensor] = {}
            for group in stage:
                inputs = [state.pop(name) for name in group.inputs]
                outputs |= zip(group.outputs, group.convert(inputs), strict=True)
            state = outputs
        return [state[name] for name in self.outputs]


def identity(*names: str) -> Mapper:
    """Keep tensors, any shape, under their names."""
    return rename({name: name for name in names})


def rename(table: Mapping[str, str]) -> Mapper:
    """Rename tensors, any shape, from old name to new name."""
    return parallel(
        *(Mapper((TensorGroup((old,), (new,), return_unchanged, return_unchanged),)) for old, new in table.items())
    )


TensorFunction = Callable[[Tensor], Tensor]
"""Function from a tensor to a tensor, both of any shape."""


def convert_one(
    name: str, convert: TensorFunction, revert: TensorFunction | None = None, target: str | None = None
) -> Mapper:
    """Convert a tensor, any shape; without a `target` it keeps its name, and `revert`, if any, is the inverse."""
    back = None if revert is None else partial(_apply_to_only_tensor, revert)
    return Mapper((TensorGroup((name,), (target or name,), partial(_apply_to_only_tensor, convert), back),))


def _apply_to_only_tensor(function: TensorFunction, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    [tensor] = tensors
    return [function(tensor)]


def transpose(name: str, first: int, second: int) -> Mapper:
    """Swap two dimensions: (..., first, ..., second, ...) to (..., second, ..., first, ...)."""

    def swap(tensor: Tensor) -> Tensor:
        return tensor.transpose(first, second)

    return convert_one(name, swap, swap)


def squeeze(name: str, dim: int) -> Mapper:
    """Remove dimension `dim`, which has size 1. Raises ValueError for another size."""
    return unsqueeze(name, dim).inverse()


def unsqueeze(name: str, dim: int) -> Mapper:
    """Insert a dimension with size 1 at `dim`."""
    return convert_one(name, lambda tensor: tensor.unsqueeze(dim), lambda tensor: _squeeze_dim(tensor, dim))


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
    return convert_one(name, lambda tensor: tensor[tensor_slice.index()])


def to_dtype(name: str, dtype: torch.dtype) -> Mapper:
    """Cast a floating-point tensor, any shape; without an inverse."""
    return convert_one(name, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def distribute_like(name: str, tensor: Tensor) -> Mapper:
    """
    Turn a tensor that is whole on every rank into a DTensor like `tensor` (any shape), without communication; keep it
    if `tensor` is not a DTensor.
    """

    def distribute(whole: Tensor) -> Tensor:
        if not is_dtensor(tensor):
            return whole
        # imported here, because the import takes a second, and most runs shard nothing
        from torch.distributed.tensor import distribute_tensor

        like: Any = tensor
        return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)

    return convert_one(name, distribute)
