"""
Sharding of pytrees into one pytree per microbatch, and joining of the shards.

A spec applies to every leaf of a tree: "shard" cuts a tensor or a list into slices along its first dimension, "stack"
gives every microbatch one entry of the first dimension, and "replicate" gives every microbatch all of it. Lists are
leaves, like tensors of one dimension, unless they are replicated. None stays None.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drawloom.components.state.trees import ChooseSpec, Spec, list_labelled_children, replace_children


def choose_spec_of_whole_leaf(leaf: Any) -> Spec:
    """Return the inferred spec of a value of the whole batch: tensors and lists are sharded, others replicated."""
    return "shard" if _has_entries(leaf) else "replicate"


def choose_spec_of_shard_leaf(leaf: Any) -> Spec:
    """Return the inferred spec of one microbatch's value: tensors and lists are concatenated, others stacked."""
    return "shard" if _has_entries(leaf) else "stack"


def shard_tree(tree: Any, choose_spec: ChooseSpec, count: int) -> list[Any]:
    """
    Return the shards of a pytree for `count` microbatches; tensors are views.

    Raises ValueError, with the path in the tree, for values that the spec can't shard.
    """
    if count < 1:
        raise ValueError(f"a tree can't be sharded into {count} parts; write at least 1")
    return _shard_node(tree, choose_spec, count, "")


def unshard_tree(shards: Sequence[Any], choose_spec: ChooseSpec) -> Any:
    """
    Join shards, in order, into one pytree.

    Replicated values must be equal, and comparing tensors synchronizes with the device. Raises ValueError, with the
    path in the tree, for values that the spec can't join.
    """
    if not shards:
        raise ValueError("there are no shards to join")
    return _join_microbatch_nodes(list(shards), choose_spec, "")


def _has_entries(leaf: Any) -> bool:
    return isinstance(leaf, list) or (isinstance(leaf, Tensor) and leaf.ndim > 0)


def _list_children_unless_leaf(value: Any, spec: Spec) -> list[tuple[str, Any]] | None:
    """Return a node's children with their access expressions; None for a leaf, such as a list that is divided."""
    return None if isinstance(value, list) and spec != "replicate" else list_labelled_children(value)


def _shard_node(value: Any, choose_spec: ChooseSpec, count: int, path: str) -> list[Any]:
    """Return a node's shards; a leaf is sharded by its spec, a tree child by child."""
    spec = choose_spec(value)
    children = _list_children_unless_leaf(value, spec)
    if children is not None:
        columns = [_shard_node(child, choose_spec, count, path + step) for step, child in children]
        return [replace_children(value, [column[index] for column in columns]) for index in range(count)]
    if spec == "replicate" or value is None:
        return [value] * count
    _check_has_entries(value, spec, path)
    size = len(value)
    if spec == "stack":
        if size != count:
            reason = f"{_describe_kind(value)} has size {size} along dimension 0"
            raise _make_error(path, f"{reason}, not one entry for each of {count} microbatches")
        return [*value]
    share, rest = divmod(size, count)
    if rest:
        reason = f"{_describe_kind(value)} can't be cut evenly into {count} along dimension 0"
        raise _make_error(path, f'{reason}; "replicate" would give each microbatch all of it')
    return [value[share * index : share * (index + 1)] for index in range(count)]


def _join_microbatch_nodes(values: list[Any], choose_spec: ChooseSpec, path: str) -> Any:
    """Join one node's values, one by microbatch: leaves by their spec, trees with equal children child by child."""
    spec = choose_spec(values[0])
    children = [_list_children_unless_leaf(value, spec) for value in values]
    if children[0] is None and not any(children):
        return _unshard_leaf(values, spec, path)
    rows = [dict(labelled or ()) for labelled in children]  # children by access expression, such as `.name`
    if children[0] is not None and (other := next((row for row in rows if row.keys() != rows[0].keys()), None)):
        names = ", ".join(sorted(other.keys() ^ rows[0].keys()))
        raise _make_error(
            path,
            f"microbatch {rows.index(other)} and the first one do not both have {names}; write the same entries in all",
        )
    if children[0] is None or len(set(map(type, values))) > 1:
        raise _make_error(path, f"microbatches have values of different forms: {_describe_kinds(values)}")
    joined = [_join_microbatch_nodes([row[step] for row in rows], choose_spec, path + step) for step in rows[0]]
    return replace_children(values[0], joined)


def _unshard_leaf(values: list[Any], spec: Spec, path: str) -> Any:
    if spec == "replicate" or all(value is None for value in values):
        return _require_equal(values, path)
    kinds = {next((kind for kind in (Tensor, list) if isinstance(value, kind)), object) for value in values}
    # A mix of tensors and lists can't be joined, and torch's error would not name the path.
    if len(kinds) > 1:
        raise _make_error(path, f"microbatches have values of different forms: {_describe_kinds(values)}")
    if spec == "stack" and Tensor not in kinds:
        return values
    if list in kinds:
        return [item for value in values for item in value]
    if spec == "shard":
        _check_has_entries(values[0], spec, path)
    try:
        return torch.stack(values) if spec == "stack" else torch.cat(values)
    except RuntimeError as error:
        shapes = "equal shapes" if spec == "stack" else "shapes that differ only in dimension 0"
        text = f"\"{spec}\" can't join the microbatches' tensors, {_describe_kinds(values)}; use {shapes}"
        raise _make_error(path, text) from error


def _check_has_entries(value: Any, spec: Spec, path: str) -> None:
    """Raise ValueError unless this is a list, or a tensor with a dimension."""
    if not isinstance(value, Tensor | list):
        text = f'{_describe_kind(value)} can\'t be cut or joined by "{spec}", only tensors and lists can'
        raise _make_error(path, text)
    if not _has_entries(value):
        raise _make_error(path, f'{_describe_kind(value)} has no dimension for "{spec}"; write a tensor with entries')


def _require_equal(values: list[Any], path: str) -> Any:
    """Return the common value of all microbatches; ValueError if values differ."""
    for index, value in enumerate(values):
        if not _are_equal(values[0], value):
            text = f'the spec is "replicate", but microbatches 0 and {index} have different values; write "stack"'
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
