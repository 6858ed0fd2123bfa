"""Whether a value of one annotated type may stand where another is promised; in doubt it may."""

import types
import typing
from typing import Any, Literal

WIDER = {int: (float, complex), float: (complex,)}
"""What type checkers take for a number, beside the number itself."""


def assignable(given: Any, promised: Any) -> bool:
    """Whether `given` is `promised` or a special case of it; generics by their parameters where both have them."""
    if _is_open(given) or _is_open(promised) or given == promised:
        return True
    if _is_union(given):
        return all(assignable(member, promised) for member in typing.get_args(given))
    if _is_union(promised):
        return any(assignable(given, member) for member in typing.get_args(promised))
    if typing.get_origin(given) is Literal:
        return _literal(given, promised)
    if typing.get_origin(promised) is Literal:
        return False
    return _classes(given, promised)


def _is_open(kind: Any) -> bool:
    """Whether a type says nothing: Any, object, a variable, a name that is not resolved."""
    return kind in (Any, object) or isinstance(kind, typing.TypeVar | str | typing.ForwardRef)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _literal(given: Any, promised: Any) -> bool:
    values = typing.get_args(given)
    if typing.get_origin(promised) is Literal:
        return set(values) <= set(typing.get_args(promised))
    return all(assignable(type(value), promised) for value in values)


def _classes(given: Any, promised: Any) -> bool:
    ours, theirs = (_class_of(kind) for kind in (given, promised))
    if ours is None or theirs is None:
        return (ours is None) == (theirs is None) and given == promised
    if getattr(theirs, "_is_protocol", False) or theirs in WIDER.get(ours, ()):
        return True
    pairs = zip(typing.get_args(given), typing.get_args(promised), strict=False)
    return _is_subclass(ours, theirs) and all(assignable(*pair) for pair in pairs)


def _class_of(kind: Any) -> type | None:
    kind = type(None) if kind is None else typing.get_origin(kind) or kind
    return kind if isinstance(kind, type) else None


def _is_subclass(given: type, promised: type) -> bool:
    try:
        return issubclass(given, promised)
    except TypeError:
        return True
