"""Whether a value of one annotated type is assignable to another; true if the annotations do not say."""

import collections.abc
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

Fits = Callable[[type, Any], bool]
"""Whether a class implements a Protocol, which may have type parameters."""

WIDER = {int: (float, complex), float: (complex,)}
"""Types to which PEP 484 makes int and float assignable although they are no subclasses."""

FUNCTION: type = collections.abc.Callable  # type: ignore[assignment]


def assignable(given: Any, promised: Any, fits: Fits = lambda given, promised: True) -> bool:
    """Whether `given` is assignable to `promised`; generics by their parameters where both have them."""
    given, promised = _bare(given), _bare(promised)
    if promised is object or _is_open(given) or _is_open(promised) or given == promised:
        return True
    if _is_union(given):
        return all(assignable(member, promised, fits) for member in typing.get_args(given))
    if _is_union(promised):
        return any(assignable(given, member, fits) for member in typing.get_args(promised))
    if typing.get_origin(given) is Literal:
        return _literal(given, promised, fits)
    if typing.get_origin(promised) is Literal:
        return False
    return _classes(given, promised, fits)


def bindings(kind: Any, base: Any) -> dict[Any, Any]:
    """
    The type arguments that a class or annotated type `kind` gives to the parameters of a generic `base`, where known.

    Keys are type variables, or indices for the standard library's generics, which have no type variables.
    """
    origin, base = typing.get_origin(kind) or kind, typing.get_origin(base) or base
    arguments = typing.get_args(kind)
    own = dict(zip(getattr(origin, "__parameters__", None) or range(len(arguments)), arguments, strict=False))
    if origin is base:
        return own
    for above in getattr(origin, "__orig_bases__", ()):
        parent = typing.get_origin(above) or above
        if isinstance(parent, type) and base in parent.__mro__:
            return bindings(substitute(above, own), base)
    return {}


def substitute(kind: Any, known: Mapping[Any, Any]) -> Any:
    """A type with its known type variables replaced."""
    if isinstance(kind, typing.TypeVar):
        return known.get(kind, kind)
    open_parameters = getattr(kind, "__parameters__", ())
    if not open_parameters or isinstance(kind, type) or not known.keys() & set(open_parameters):
        return kind
    return kind[tuple(known.get(parameter, parameter) for parameter in open_parameters)]


def _bare(kind: Any) -> Any:
    """The type inside Annotated, ClassVar, Final and NewType."""
    while True:
        if typing.get_origin(kind) in (typing.Annotated, typing.ClassVar, typing.Final):
            kind = typing.get_args(kind)[0]
        elif isinstance(kind, typing.NewType):
            kind = kind.__supertype__
        else:
            return kind


def _is_open(kind: Any) -> bool:
    """Whether a type accepts anything: Any, Self, a type variable, a name that is not resolved."""
    return kind in (Any, typing.Self) or isinstance(kind, typing.TypeVar | str | typing.ForwardRef)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _literal(given: Any, promised: Any, fits: Fits) -> bool:
    values = typing.get_args(given)
    if typing.get_origin(promised) is Literal:
        # With their types, since 1 == True == 1.0 in Python.
        return {(type(value), value) for value in values} <= {(type(v), v) for v in typing.get_args(promised)}
    return all(assignable(type(value), promised, fits) for value in values)


def _classes(given: Any, promised: Any, fits: Fits) -> bool:
    ours, theirs = (_class_of(kind) for kind in (given, promised))
    if ours is None or theirs is None:
        return (ours is None) == (theirs is None) and given == promised
    if theirs in WIDER.get(ours, ()):
        return True
    if theirs is FUNCTION:
        return _callables(given, promised, fits)
    if getattr(theirs, "_is_protocol", False) and theirs not in ours.__mro__:
        return fits(ours, promised)
    return _is_subclass(ours, theirs) and all(
        assignable(one, other, fits) for one, other in _pairs(given, promised, theirs)
    )


def _pairs(given: Any, promised: Any, common: type) -> Iterator[tuple[Any, Any]]:
    """Pairs of type arguments of two generics for the same parameter, where both have one."""
    theirs = typing.get_args(promised)
    if common is tuple and Ellipsis in theirs:
        yield from ((kind, theirs[0]) for kind in typing.get_args(given) if kind is not Ellipsis)
    elif common is tuple and typing.get_args(given) and theirs:
        ours = typing.get_args(given)
        unlike = len(ours) != len(theirs) or Ellipsis in ours
        yield from [(int, str)] if unlike else zip(ours, theirs, strict=True)  # a pair that is not assignable
    else:
        ours = tuple(bindings(given, common).values()) or typing.get_args(given)
        yield from zip(ours, theirs, strict=False)


def _callables(given: Any, promised: Any, fits: Fits) -> bool:
    """Parameters are contravariant, the return type is covariant."""
    ours, theirs = typing.get_args(given), typing.get_args(promised)
    if _class_of(given) is not FUNCTION or not ours or not theirs:
        return bool(ours) or _is_subclass(_class_of(given) or object, FUNCTION)
    if not assignable(ours[1], theirs[1], fits):
        return False
    if not (isinstance(ours[0], list) and isinstance(theirs[0], list)):
        return True
    pairs = zip(theirs[0], ours[0], strict=False)
    return len(ours[0]) == len(theirs[0]) and all(assignable(one, other, fits) for one, other in pairs)


def _class_of(kind: Any) -> type | None:
    kind = type(None) if kind is None else typing.get_origin(kind) or kind
    return kind if isinstance(kind, type) else None


def _is_subclass(given: type, promised: type) -> bool:
    try:
        return issubclass(given, promised)
    except TypeError:  # protocols with data members refuse issubclass
        return True
