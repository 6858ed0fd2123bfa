"""
Trees of values: dicts, lists, tuples, dataclasses and attrs classes, taken apart and put together again.

Anything else is a leaf. A node is put together without its constructor, so that fields which no constructor takes, and
values which a constructor would refuse, pass through.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
from torch import Tensor

Branch = tuple[str, Any]
"""The way to a child as one would write it behind its parent (`['x']`, `[0]`, `.x`), and the child."""


def branches(node: Any) -> list[Branch] | None:
    """The children of a node in their order; None if it is a leaf."""
    if isinstance(node, Tensor):
        return None  # at once: most leaves are, and pipelines take trees apart for each action
    if isinstance(node, dict):
        return [(f"[{key!r}]", child) for key, child in node.items()]
    if type(node) in (list, tuple) or _is_named_tuple(node):
        return [(f"[{place}]", child) for place, child in enumerate(node)]
    if _has_fields(node):
        return [(f".{name}", getattr(node, name)) for name in _fields(node)]
    return None


def rebuild(node: Any, children: Sequence[Any]) -> Any:
    """A node like this one with other children, given in the same order."""
    if type(node) in (list, tuple):
        return type(node)(children)
    if _is_named_tuple(node):
        return node._make(children)
    new = copy.copy(node)
    if isinstance(node, dict):
        new.update(zip(node, children, strict=True))
    else:
        for name, child in zip(_fields(node), children, strict=True):
            object.__setattr__(new, name, child)  # frozen classes too
    return new


def transform(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with each leaf replaced; every node is new."""
    if isinstance(tree, Tensor):
        return function(tree)
    found = branches(tree)
    return function(tree) if found is None else rebuild(tree, [transform(function, child) for _, child in found])


def leaves(tree: Any) -> list[Any]:
    """All leaves, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    found = branches(tree)
    return [tree] if found is None else [leaf for _, child in found for leaf in leaves(child)]


def fill(tree: Any, values: Iterable[Any]) -> Any:
    """The tree with its leaves, in order, replaced by these values."""
    rest = iter(values)
    return transform(lambda _: next(rest), tree)


def _is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_make")


def _has_fields(node: Any) -> bool:
    return not isinstance(node, type) and (attrs.has(type(node)) or dataclasses.is_dataclass(node))


def _fields(node: Any) -> list[str]:
    fields = attrs.fields(type(node)) if attrs.has(type(node)) else dataclasses.fields(node)
    return [field.name for field in fields]
