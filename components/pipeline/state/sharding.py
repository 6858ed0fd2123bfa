"""
Trees cut into one tree for each microbatch, and such trees joined again.

A specification holds for all that hangs below it, so one `Shard()` cuts every tensor of a dict. Lists are cut as if
they were tensors of one dimension, unless the specification has a list in their place; None stays None.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from drawloom.components.ports.pipeline import Replicate, Shard, SpecTree, Stack
from drawloom.components.storage.pytree import branches, rebuild


def spec_of_whole(value: Any) -> SpecTree:
    """
    For a value of the whole batch: tensors and lists are cut along dimension 0.

    Tensors without dimensions and all else are the same for every microbatch.
    """
    return _by_leaf(lambda leaf: Shard() if isinstance(leaf, Tensor) and leaf.ndim else Replicate(), value)


def spec_of_shard(value: Any) -> SpecTree:
    """
    For a value of one microbatch: tensors and lists are joined along dimension 0.

    Tensors without dimensions are stacked, and all else is gathered in a list.
    """
    return _by_leaf(lambda leaf: Shard() if isinstance(leaf, Tensor) and leaf.ndim else Stack(), value)


def _by_leaf(choose: Callable[[Any], SpecTree], value: Any) -> SpecTree:
    if isinstance(value, list):
        return Shard()
    found = branches(value)
    return choose(value) if found is None else rebuild(value, [_by_leaf(choose, child) for _, child in found])


def shard_tree(tree: Any, spec: SpecTree, count: int, *, even: bool = True) -> list[Any]:
    """
    What each of `count` microbatches has of a tree. Tensors are views.

    Sizes that `count` does not divide are an error, or, if not `even`, the first parts are larger by one. Raises
    ValueError, with the place in the tree, for what can't be cut so.
    """
    if count < 1:
        raise ValueError(f"a tree can't be cut into {count} parts")
    return _cut(tree, spec, count, even, "")


def unshard_tree(shards: Sequence[Any], spec: SpecTree) -> Any:
    """
    The tree of which these are the parts, in order. What is replicated is compared, which waits for the device.

    Raises ValueError, with the place in the tree, for what can't be joined so.
    """
    if not shards:
        raise ValueError("there are no parts to join")
    return _join(list(shards), spec, "")


def check_spec(spec: SpecTree) -> None:
    """Raise a ValueError, with the place in the tree, for what is no specification."""
    _check(spec, "")


def is_leaf_spec(spec: SpecTree) -> bool:
    """Whether a specification is one of the three, and not a tree of them."""
    return isinstance(spec, Shard | Stack | Replicate)


def _check(spec: SpecTree, path: str) -> None:
    if is_leaf_spec(spec):
        return
    found = branches(spec)
    if found is None:
        raise _misfit(path, f"{spec!r} is no specification; write Shard(dim), Stack(dim) or Replicate()")
    for step, child in found:
        _check(child, path + step)


def _branches(value: Any, spec: SpecTree, path: str) -> list[tuple[str, Any, SpecTree]] | None:
    """The children of a node, each with its specification; None if the specification takes the value as one."""
    found = branches(value)
    if is_leaf_spec(spec):
        whole = isinstance(value, list) and not isinstance(spec, Replicate)
        return None if found is None or whole else [(step, child, spec) for step, child in found]
    specs = dict(branches(spec) or ())
    steps = [step for step, _ in found or ()]
    if found is None or set(steps) != set(specs):
        there = "a leaf" if found is None else ", ".join(steps) or "nothing"
        raise _misfit(path, f"the specification has {', '.join(specs) or 'nothing'} here, the value {there}")
    return [(step, child, specs[step]) for step, child in found]


def _cut(value: Any, spec: SpecTree, count: int, even: bool, path: str) -> list[Any]:
    found = _branches(value, spec, path)
    if found is None:
        return _cut_leaf(value, spec, count, even, path)
    columns = [_cut(child, below, count, even, path + step) for step, child, below in found]
    return [rebuild(value, [column[place] for column in columns]) for place in range(count)]


def _cut_leaf(value: Any, spec: SpecTree, count: int, even: bool, path: str) -> list[Any]:
    if isinstance(spec, Replicate) or value is None:
        return [value] * count
    size = _size(value, spec, path)
    if isinstance(spec, Stack) and size != count:
        raise _misfit(path, f"{_kind(value)} is no stack of {count} along dimension {spec.dim}, but one of {size}")
    if even and size % count:
        reason = f"{_kind(value)} can't be cut evenly into {count} along dimension {spec.dim}"
        raise _misfit(path, f"{reason}; Replicate() would give each microbatch all of it")
    if isinstance(value, list):
        return list(value) if isinstance(spec, Stack) else _cut_list(value, count)
    return list(value.unbind(spec.dim) if isinstance(spec, Stack) else value.tensor_split(count, spec.dim))


def _cut_list(items: list[Any], count: int) -> list[list[Any]]:
    """The same sizes as those of torch.tensor_split."""
    share, extra = divmod(len(items), count)
    ends = [share * place + min(place, extra) for place in range(count + 1)]
    return [items[start:end] for start, end in pairwise(ends)]


def _size(value: Any, spec: Shard | Stack, path: str) -> int:
    """The size of what is cut, along the dimension in which it is."""
    if isinstance(value, list):
        if spec.dim != 0:
            raise _misfit(path, f"a list has dimension 0 alone, and the specification is {spec}")
        return len(value)
    _need_dimension(value, spec, 0, path)
    return int(value.size(spec.dim))


def _join(values: list[Any], spec: SpecTree, path: str) -> Any:
    found = [_branches(value, spec, path) for value in values]
    first = found[0]
    if first is None and not any(found):
        return _join_leaf(values, spec, path)
    rows = [{step: child for step, child, _ in one or ()} for one in found]
    if first is None or any(row.keys() != rows[0].keys() for row in rows) or len(set(map(type, values))) > 1:
        raise _misfit(path, f"microbatches have values of different forms: {_kinds(values)}")
    children = [_join([row[step] for row in rows], below, path + step) for step, _, below in first]
    return rebuild(values[0], children)


def _join_leaf(values: list[Any], spec: SpecTree, path: str) -> Any:
    if isinstance(spec, Replicate) or all(value is None for value in values):
        return _agreed(values, path)
    kinds = {next((kind for kind in (Tensor, list) if isinstance(value, kind)), object) for value in values}
    if len(kinds) > 1:
        raise _misfit(path, f"microbatches have values of different forms: {_kinds(values)}")
    if isinstance(spec, Stack) and Tensor not in kinds:
        return list(values)
    if list in kinds:
        _size(values[0], spec, path)
        return [item for value in values for item in value]
    return _join_tensors(values, spec, path)


def _join_tensors(values: list[Any], spec: Shard | Stack, path: str) -> Tensor:
    stacked = isinstance(spec, Stack)
    _need_dimension(values[0], spec, stacked, path)
    try:
        return torch.stack(values, spec.dim) if stacked else torch.cat(values, spec.dim)
    except RuntimeError as error:
        raise _misfit(path, f"the parts can't be joined by {spec}: {_kinds(values)}") from error


def _need_dimension(value: Any, spec: Shard | Stack, more: int, path: str) -> None:
    """Raise a ValueError if this is no tensor that has, or has with so many dimensions more, what is specified."""
    if not isinstance(value, Tensor):
        raise _misfit(path, f"{_kind(value)} can't be cut or joined by {spec}, only tensors and lists can")
    dimensions = value.ndim + more
    if not -dimensions <= spec.dim < dimensions:
        instead = f"a dimension below {dimensions}" if dimensions else "Stack()"
        raise _misfit(path, f"{_kind(value)} has no dimension for {spec}; write {instead}")


def _agreed(values: list[Any], path: str) -> Any:
    """The one value of all microbatches."""
    for place, value in enumerate(values):
        if not _same(values[0], value):
            raise _misfit(path, f"it is replicated, but differs between microbatches 0 and {place}")
    return values[0]


def _same(one: Any, other: Any) -> bool:
    """Whether two leaves are equal, NaN being equal to NaN."""
    if one is other:
        return True
    if any(getattr(one, trait, None) != getattr(other, trait, None) for trait in ("__class__", "shape", "dtype")):
        return False
    equal = (one == other) | ((one != one) & (other != other))
    return bool(equal.all() if hasattr(equal, "all") else equal)


def _kinds(values: list[Any]) -> str:
    return ", ".join(dict.fromkeys(_kind(value) for value in values))


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = f"list of {len(value)}" if isinstance(value, list) else type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _misfit(path: str, reason: str) -> ValueError:
    return ValueError(f"at {path}: {reason}" if path else reason)
