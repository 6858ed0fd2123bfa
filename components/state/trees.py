"""
Trees of values (pytrees): dicts, lists, tuples, named tuples, dataclasses and attrs classes; anything else is a leaf.

Unlike torch.utils._pytree it walks dataclasses and attrs classes without registration, and rebuilds a node without
calling its constructor, so that fields without a constructor argument, and values that the constructor would reject (a
shape instead of a tensor), are kept.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import attrs
from torch import Tensor

Spec = Literal["shard", "stack", "replicate"]
"""How microbatches divide a leaf of a step's value; see `sharding.py`."""

ChooseSpec = Callable[[Any], Spec]
"""Function of a leaf to its spec."""


def list_children(node: Any) -> list[tuple[Any, Any]] | None:
    """Return the children of a node, in order, with their keys, indices or field names; None for a leaf."""
    if isinstance(node, Tensor):
        return None  # checked first: most leaves are tensors, and pipelines walk a tree for every action
    if isinstance(node, dict):
        return list(node.items())
    if type(node) in (list, tuple) or (isinstance(node, tuple) and hasattr(node, "_make")):
        return list(enumerate(node))
    if not isinstance(node, type) and (attrs.has(type(node)) or dataclasses.is_dataclass(node)):
        fields = attrs.fields(type(node)) if attrs.has(type(node)) else dataclasses.fields(node)
        return [(field.name, getattr(node, field.name)) for field in fields]
    return None


def list_labelled_children(node: Any) -> list[tuple[str, Any]] | None:
    """Return the children of a node with their access expressions, `['x']`, `[0]` or `.x`; None for a leaf."""
    nodes = list_children(node)
    if nodes is None:
        return None
    access = "[{!r}]" if isinstance(node, dict | list | tuple) else ".{}"
    return [(access.format(key), child) for key, child in nodes]


def replace_children(node: Any, children: Sequence[Any]) -> Any:
    """Return a copy of a node with other children, in the same order."""
    if type(node) in (list, tuple):
        return type(node)(children)
    new = copy.copy(node)
    if isinstance(node, dict):
        new.update(zip(node, children, strict=True))
    elif isinstance(node, tuple):
        return node._make(children)  # type: ignore[attr-defined]
    else:
        for (name, _), child in zip(list_children(node) or (), children, strict=True):
            object.__setattr__(new, name, child)  # setattr would fail for frozen classes
    return new


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a new tree with `function` applied to every leaf."""
    if isinstance(tree, Tensor):
        return function(tree)  # the usual case between stages, where microseconds matter
    nodes = list_children(tree)
    return (
        function(tree) if nodes is None else replace_children(tree, [map_leaves(function, child) for _, child in nodes])
    )


def map_leaves_with_path(function: Callable[[tuple[Any, ...], Any], Any], tree: Any, path: tuple[Any, ...] = ()) -> Any:
    """Return a new tree with `function(path, leaf)` for every leaf; a path has keys, indices and field names."""
    nodes = list_children(tree)
    if nodes is None:
        return function(path, tree)
    return replace_children(tree, [map_leaves_with_path(function, child, (*path, key)) for key, child in nodes])


def list_leaves(tree: Any) -> list[Any]:
    """Return all leaves, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    nodes = list_children(tree)
    return [tree] if nodes is None else [leaf for _, child in nodes for leaf in list_leaves(child)]


def replace_leaves(tree: Any, values: Iterable[Any]) -> Any:
    """Return a copy of the tree whose leaves are these values, in order."""
    rest = iter(values)
    return map_leaves(lambda _: next(rest), tree)
