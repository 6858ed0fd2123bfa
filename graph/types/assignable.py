"""Assignability of annotated types. A type without annotations is assignable to everything."""

import collections.abc
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

ImplementsProtocol = Callable[[type, Any], bool]
"""Predicate: whether a class implements a Protocol, which may have type parameters."""

WIDER = {int: (float, complex), float: (complex,)}
"""Types to which PEP 484 makes int and float assignable although they are not subclasses."""

FUNCTION: type = collections.abc.Callable  # type: ignore[assignment]


def is_assignable(
    source: Any, target: Any, implements_protocol: ImplementsProtocol = lambda source, target: True
) -> bool:
    """
    Return whether `source` is assignable to `target`. Generics are compared by their parameters if both have some.
    """
    source, target = _unwrap_annotation(source), _unwrap_annotation(target)
    if target is object or _does_accept_anything(source) or _does_accept_anything(target) or source == target:
        return True
    if _is_union(source):
        return all(is_assignable(member, target, implements_protocol) for member in typing.get_args(source))
    if _is_union(target):
        return any(is_assignable(source, member, implements_protocol) for member in typing.get_args(target))
    if typing.get_origin(source) is Literal:
        return _is_literal_assignable(source, target, implements_protocol)
    if typing.get_origin(target) is Literal:
        return False
    return _is_class_assignable(source, target, implements_protocol)


def find_type_arguments(kind: Any, base: Any) -> dict[Any, Any]:
    """
    Return the type arguments with which a class or annotated type `kind` binds the parameters of a generic `base`.

    Keys are type variables, or indices for generics of the standard library, which have no type variables. Unknown
    arguments are left out.
    """
    origin, base = typing.get_origin(kind) or kind, typing.get_origin(base) or base
    arguments = typing.get_args(kind)
    own = dict(zip(getattr(origin, "__parameters__", None) or range(len(arguments)), arguments, strict=False))
    if origin is base:
        return own
    for generic_base in getattr(origin, "__orig_bases__", ()):
        parent = typing.get_origin(generic_base) or generic_base
        if isinstance(parent, type) and base in parent.__mro__:
            return find_type_arguments(substitute_type_variables(generic_base, own), base)
    return {}


def substitute_type_variables(kind: Any, known: Mapping[Any, Any]) -> Any:
    """Replace the known type variables in a type."""
    if isinstance(kind, typing.TypeVar):
        return known.get(kind, kind)
    open_parameters = getattr(kind, "__parameters__", ())
    if not open_parameters or isinstance(kind, type) or not known.keys() & set(open_parameters):
        return kind
    return kind[tuple(known.get(parameter, parameter) for parameter in open_parameters)]


def _unwrap_annotation(kind: Any) -> Any:
    """Return the type inside Annotated, ClassVar, Final and NewType."""
    while True:
        if typing.get_origin(kind) in (typing.Annotated, typing.ClassVar, typing.Final):
            kind = typing.get_args(kind)[0]
        elif isinstance(kind, typing.NewType):
            kind = kind.__supertype__
        else:
            return kind


def _does_accept_anything(kind: Any) -> bool:
    """Return whether a type accepts anything: Any, Self, a type variable, or an unresolved name."""
    return kind in (Any, typing.Self) or isinstance(kind, typing.TypeVar | str | typing.ForwardRef)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


def _is_literal_assignable(source: Any, target: Any, implements_protocol: ImplementsProtocol) -> bool:
    values = typing.get_args(source)
    if typing.get_origin(target) is Literal:
        # Compared with their types, since 1 == True == 1.0 in Python.
        return {(type(value), value) for value in values} <= {(type(v), v) for v in typing.get_args(target)}
    return all(is_assignable(type(value), target, implements_protocol) for value in values)


def _is_class_assignable(source: Any, target: Any, implements_protocol: ImplementsProtocol) -> bool:
    source_class, target_class = (_runtime_class(kind) for kind in (source, target))
    if source_class is None or target_class is None:
        return (source_class is None) == (target_class is None) and source == target
    if target_class in WIDER.get(source_class, ()):
        return True
    if target_class is FUNCTION:
        return _is_callable_assignable(source, target, implements_protocol)
    if getattr(target_class, "_is_protocol", False) and target_class not in source_class.__mro__:
        return implements_protocol(source_class, target)
    return _may_be_subclass(source_class, target_class) and all(
        is_assignable(part, wanted, implements_protocol)
        for part, wanted in _pair_type_arguments(source, target, target_class)
    )


def _pair_type_arguments(source: Any, target: Any, common: type) -> Iterator[tuple[Any, Any]]:
    """
    Yield pairs of type arguments, all of which must be assignable; none if either generic has no arguments.

    `common` is the class of `target`, which the class of `source` is or derives from.
    """
    # Classes of the standard library do not declare how they pass arguments to a base: `list[int]` to `Sequence`.
    source_arguments = tuple(find_type_arguments(source, common).values()) or typing.get_args(source)
    target_arguments = typing.get_args(target)
    if common is not tuple or not source_arguments or not target_arguments:
        yield from zip(source_arguments, target_arguments, strict=False)
    elif Ellipsis in target_arguments:
        yield from ((kind, target_arguments[0]) for kind in source_arguments if kind is not Ellipsis)
    elif Ellipsis in source_arguments or len(source_arguments) != len(target_arguments):
        yield int, str  # not assignable, so the tuples are not, either
    else:
        yield from zip(source_arguments, target_arguments, strict=True)


def _is_callable_assignable(source: Any, target: Any, implements_protocol: ImplementsProtocol) -> bool:
    """Compare parameters as contravariant and the return type as covariant."""
    source_arguments, target_arguments = typing.get_args(source), typing.get_args(target)
    if _runtime_class(source) is not FUNCTION or not source_arguments or not target_arguments:
        return bool(source_arguments) or _may_be_subclass(_runtime_class(source) or object, FUNCTION)
    if not is_assignable(source_arguments[1], target_arguments[1], implements_protocol):
        return False
    if not (isinstance(source_arguments[0], list) and isinstance(target_arguments[0], list)):
        return True
    pairs = zip(target_arguments[0], source_arguments[0], strict=False)
    return len(source_arguments[0]) == len(target_arguments[0]) and all(
        is_assignable(part, wanted, implements_protocol) for part, wanted in pairs
    )


def _runtime_class(kind: Any) -> type | None:
    kind = type(None) if kind is None else typing.get_origin(kind) or kind
    return kind if isinstance(kind, type) else None


def _may_be_subclass(source: type, target: type) -> bool:
    try:
        return issubclass(source, target)
    except TypeError:  # issubclass refuses protocols with data members
        return True


def union_members_except_none(union: Any) -> list[Any]:
    """Return a union's members except None, or the type itself if it is not a union."""
    if typing.get_origin(union) not in (typing.Union, types.UnionType):
        return [union]
    return [member for member in typing.get_args(union) if member is not type(None)]
