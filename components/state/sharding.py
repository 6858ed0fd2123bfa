"""
Sharding of pytrees into one pytree per microbatch, and joining of the shards.

A sharding spec applies to its whole subtree, so one `Shard()` shards every tensor of a dict. Lists are sharded like
tensors of one dimension, unless the spec itself has a list there; None stays None.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from drawloom.components.state.specs import Replicate, Shard, SpecTree, Stack
from drawloom.components.state.trees import list_labelled_children, replace_children


def infer_batch_spec(value: Any) -> SpecTree:
    """
    Infer the spec of a value of the whole batch: tensors and lists are sharded along dimension 0.

    Tensors without dimensions and all other values are replicated.
    """
    return _infer_spec(lambda leaf: Shard() if isinstance(leaf, Tensor) and leaf.ndim else Replicate(), value)


def infer_shard_spec(value: Any) -> SpecTree:
    """
    Infer the spec of a value of one microbatch: tensors and lists are concatenated along dimension 0.

    Tensors without dimensions are stacked, and all other values are gathered in a list.
    """
    return _infer_spec(lambda leaf: Shard() if isinstance(leaf, Tensor) and leaf.ndim else Stack(), value)


def _infer_spec(choose_leaf_spec: Callable[[Any], SpecTree], value: Any) -> SpecTree:
    """Return a tree's spec: `choose_leaf_spec` decides for leaves, and lists are sharded."""
    if isinstance(value, list):
        return Shard()
    children = list_labelled_children(value)
    return (
        choose_leaf_spec(value)
        if children is None
        else replace_children(value, [_infer_spec(choose_leaf_spec, child) for _, child in children])
    )


def shard_tree(tree: Any, spec: SpecTree, count: int, *, even: bool = True) -> list[Any]:
    """
    Return the shards of a pytree for `count` microbatches; tensors are views.

    Sizes that are not divisible by `count` are an error, or, if not `even`, the first shards are larger by one. Raises
    ValueError, with the path in the tree, for values that the spec can't shard.
    """
    if count < 1:
        raise ValueError(f"a tree can't be sharded into {count} parts; write at least 1")
    return _shard_node(tree, spec, count, even, "")


def unshard_tree(shards: Sequence[Any], spec: SpecTree) -> Any:
    """
    Join shards, in order, into one pytree.

    Replicated values must be equal, and comparing tensors synchronizes with the device. Raises ValueError, with the
    path in the tree, for values that the spec can't join.
    """
    if not shards:
        raise ValueError("there are no shards to join")
    return _join_microbatch_nodes(list(shards), spec, "")


def check_spec(spec: SpecTree) -> None:
    """Raise ValueError, with the path in the tree, for values that are not sharding specs."""
    _check_specs(spec, "")


def is_leaf_spec(spec: SpecTree) -> bool:
    """Return whether a spec is a Shard, Stack or Replicate, and not a tree of specs."""
    return isinstance(spec, Shard | Stack | Replicate)


def _check_specs(spec: SpecTree, path: str) -> None:
    """Raise ValueError for the first leaf of a spec tree at `path` that is not a spec."""
    if is_leaf_spec(spec):
        return
    children = list_labelled_children(spec)
    if children is None:
        raise _make_error(path, f"{spec!r} is not a sharding spec; write Shard(dim), Stack(dim) or Replicate()")
    for step, child in children:
        _check_specs(child, path + step)


def _pair_children(value: Any, spec: SpecTree, path: str) -> list[tuple[str, Any, SpecTree]] | None:
    """Return the children of a node with their specs, or None if the spec applies to the whole value."""
    children = list_labelled_children(value)
    if is_leaf_spec(spec):
        whole = isinstance(value, list) and not isinstance(spec, Replicate)
        return None if children is None or whole else [(step, child, spec) for step, child in children]
    specs = dict(list_labelled_children(spec) or ())
    steps = [step for step, _ in children or ()]
    if children is None or set(steps) != set(specs):
        there = "is a leaf" if children is None else f"has {', '.join(steps) or 'nothing'}"
        raise _make_error(path, f"the specification has {', '.join(specs) or 'nothing'} here, but the value {there}")
    return [(step, child, specs[step]) for step, child in children]


def _shard_node(value: Any, spec: SpecTree, count: int, even: bool, path: str) -> list[Any]:
    """Return a node's shards; a leaf is sharded by its spec, a tree child by child."""
    children = _pair_children(value, spec, path)
    if children is None:
        return _shard_leaf(value, spec, count, even, path)
    columns = [_shard_node(child, below, count, even, path + step) for step, child, below in children]
    return [replace_children(value, [column[index] for column in columns]) for index in range(count)]


def _shard_leaf(value: Any, spec: SpecTree, count: int, even: bool, path: str) -> list[Any]:
    if isinstance(spec, Replicate) or value is None:
        return [value] * count
    size = _get_size_along_spec_dim(value, spec, path)
    if isinstance(spec, Stack) and size != count:
        reason = f"{_describe_kind(value)} has size {size} along dimension {spec.dim}"
        raise _make_error(path, f"{reason}, not one entry for each of {count} microbatches")
    if even and size % count:
        reason = f"{_describe_kind(value)} can't be cut evenly into {count} along dimension {spec.dim}"
        raise _make_error(path, f"{reason}; Replicate() would give each microbatch all of it")
    if isinstance(value, list):
        return list(value) if isinstance(spec, Stack) else _shard_list(value, count)
    return list(value.unbind(spec.dim) if isinstance(spec, Stack) else value.tensor_split(count, spec.dim))


def _shard_list(items: list[Any], count: int) -> list[list[Any]]:
    """Return the shards of a list, with the sizes of torch.tensor_split."""
    share, extra = divmod(len(items), count)
    ends = [share * index + min(index, extra) for index in range(count + 1)]
    return [items[start:end] for start, end in pairwise(ends)]


def _get_size_along_spec_dim(value: Any, spec: Shard | Stack, path: str) -> int:
    """Return the size of a tensor or list along the dimension of the spec."""
    if isinstance(value, list):
        _check_list_dimension(spec, path)
        return len(value)
    _check_dimension(value, spec, 0, path)
    return int(value.size(spec.dim))


def _check_list_dimension(spec: Shard | Stack, path: str) -> None:
    """Raise ValueError for a dimension other than a list's only one."""
    if spec.dim != 0:
        raise _make_error(path, f"a list only has dimension 0, but the specification is {spec}")


def _join_microbatch_nodes(values: list[Any], spec: SpecTree, path: str) -> Any:
    """Join one node's values from all microbatches."""
    children = [_pair_children(value, spec, path) for value in values]
    first = children[0]
    if first is None and not any(children):
        return _unshard_leaf(values, spec, path)
    rows = [{step: child for step, child, _ in entries or ()} for entries in children]
    if other := next((row for row in rows if first is not None and row.keys() != rows[0].keys()), None):
        names = ", ".join(sorted(other.keys() ^ rows[0].keys()))
        raise _make_error(
            path,
            f"microbatch {rows.index(other)} and the first one do not both have {names}; write the same entries in all",
        )
    if first is None or len(set(map(type, values))) > 1:
        raise _make_error(path, f"microbatches have values of different forms: {_describe_kinds(values)}")
    children = [_join_microbatch_nodes([row[step] for row in rows], below, path + step) for step, _, below in first]
    return replace_children(values[0], children)


def _unshard_leaf(values: list[Any], spec: SpecTree, path: str) -> Any:
    if isinstance(spec, Replicate) or all(value is None for value in values):
        return _require_equal(values, path)
    kinds = {next((kind for kind in (Tensor, list) if isinstance(value, kind)), object) for value in values}
    # A mix of tensors and lists can't be joined, and torch's error would not name the path.
    if len(kinds) > 1:
        raise _make_error(path, f"microbatches have values of different forms: {_describe_kinds(values)}")
    if isinstance(spec, Stack) and Tensor not in kinds:
        _check_list_dimension(spec, path)
        return list(values)
    if list in kinds:
        _get_size_along_spec_dim(values[0], spec, path)
        return [item for value in values for item in value]
    return _join_microbatch_tensors(values, spec, path)


def _join_microbatch_tensors(values: list[Any], spec: Shard | Stack, path: str) -> Tensor:
    is_stack = isinstance(spec, Stack)
    _check_dimension(values[0], spec, is_stack, path)
    try:
        return torch.stack(values, spec.dim) if is_stack else torch.cat(values, spec.dim)
    except RuntimeError as error:
        shapes = "equal shapes" if is_stack else f"shapes that differ only in dimension {spec.dim}"
        text = f"{spec} can't join the microbatches' tensors, {_describe_kinds(values)}; use {shapes}"
        raise _make_error(path, text) from error


def _check_dimension(value: Any, spec: Shard | Stack, added_dims: int, path: str) -> None:
    """Raise ValueError unless this is a tensor with the spec's dimension after adding `added_dims` dimensions."""
    if not isinstance(value, Tensor):
        raise _make_error(path, f"{_describe_kind(value)} can't be cut or joined by {spec}, only tensors and lists can")
    dimensions = value.ndim + added_dims
    if not -dimensions <= spec.dim < dimensions:
        instead = f"a dimension below {dimensions}" if dimensions else "Stack()"
        raise _make_error(path, f"{_describe_kind(value)} has no dimension for {spec}; write {instead}")


def _require_equal(values: list[Any], path: str) -> Any:
    """Return the common value of all microbatches; ValueError if values differ."""
    for index, value in enumerate(values):
        if not _are_equal(values[0], value):
            text = f"the spec is Replicate(), but microbatches 0 and {index} have different values; write Stack()"
            raise _make_error(path, text)
    return values[0]


def _are_equal(first: Any, second: Any) -> bool:
    """Return whether two leaves are equal in type, shape, dtype and values; NaN equals NaN."""
    if first is second:
        return True
    if any(getattr(first, trait, None) != getattr(second, trait, None) for trait in ("__class__", "shape", "dtype")):
        return False
    equal = (first == second) | ((first != first) & (second != second))  # NaN differs from itself
    return equal if isinstance(equal, bool) else bool(equal.all())


def _describe_kinds(values: list[Any]) -> str:
    return ", ".join(dict.fromkeys(_describe_kind(value) for value in values))


def _describe_kind(value: Any) -> str:
    """Return a value's type as text, with a tensor's shape or a list's length."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    name = f"list of {len(value)}" if isinstance(value, list) else type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _make_error(path: str, reason: str) -> ValueError:
    return ValueError(f"at {path}: {reason}" if path else reason)
