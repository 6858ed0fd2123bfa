"""Check whether a class implements a port: the same members, assignable types, and the same ways to call methods."""

import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any

import attrs

from drawloom.graph.component import read_annotations
from drawloom.graph.types.assignable import (
    ImplementsProtocol,
    find_type_arguments,
    is_assignable,
    substitute_type_variables,
)

# Attributes that typing adds to every Protocol. They are not members, and differ between Python versions.
PROTOCOL_ATTRIBUTES = frozenset(dir(typing.Protocol)) | {
    "__abstractmethods__",
    "__annotations__",
    "__dict__",
    "__module__",
    "__non_callable_proto_members__",
    "__orig_bases__",
    "__parameters__",
    "__protocol_attrs__",
    "__static_attributes__",
    "__firstlineno__",
    "__weakref__",
    "_is_protocol",
    "_is_runtime_protocol",
}


def find_mismatches(cls: type, port: Any) -> list[str]:
    """Return why a class does not implement a port. The port may be generic with type arguments. Empty if it does."""
    return list(_find_mismatches(frozenset(), cls, port))


def join_mismatches(mismatches: Sequence[str]) -> str:
    """Return mismatches as one phrase, such as "has no get() and no put()"."""
    missing = [text.removeprefix("has ") for text in mismatches if text.startswith("has no ")]
    others = [text for text in mismatches if not text.startswith("has no ")]
    return " and ".join([*([f"has {missing[0]}"] if missing else []), *missing[1:], *others])


@functools.cache  # classes do not change, and every edge of the same type asks for the same pair
def implements(cls: type, port: Any) -> bool:
    """Return whether a class implements a port. The check stops at the first mismatch."""
    return _implements(frozenset(), cls, port)


def implements_any(cls: type, ports: tuple[type, ...]) -> bool:
    """Return whether a class implements at least one port."""
    return any(implements(cls, port) for port in ports)


def _implements(assumed_pairs: frozenset[tuple[type, Any]], cls: type, port: Any) -> bool:
    return next(_find_mismatches(assumed_pairs, cls, port), None) is None


def _find_mismatches(assumed_pairs: frozenset[tuple[type, Any]], cls: type, port: Any) -> Iterator[str]:
    """Yield mismatches. The pairs in `assumed_pairs` are assumed to match, since recursive Protocols must terminate."""
    if (cls, port) in assumed_pairs:
        return
    origin, arguments = typing.get_origin(port) or port, find_type_arguments(port, port)
    matcher = _Matcher(cls, origin, arguments, functools.partial(_implements, assumed_pairs | {(cls, port)}))
    if origin in cls.__mro__:
        yield from matcher.find_type_argument_mismatches()
    elif getattr(origin, "_is_protocol", False):
        for member in list_protocol_members(origin):
            yield from matcher.find_member_mismatches(member)
    else:
        yield f"is not a {origin.__name__}"


@functools.cache  # ports do not change
def list_protocol_members(port: type) -> tuple[str, ...]:
    """Return a Protocol's members, including its bases, in definition order."""
    member_names: dict[str, None] = {}
    for cls in reversed(port.__mro__):
        if getattr(cls, "_is_protocol", False) and cls is not typing.Protocol:
            names = [*inspect.get_annotations(cls), *vars(cls)]
            member_names |= dict.fromkeys(name for name in names if name not in PROTOCOL_ATTRIBUTES)
    return tuple(member_names)


@attrs.frozen
class _Matcher:
    """Comparison of a class with a port whose type variables have the expected type arguments `arguments`."""

    cls: type
    port: type
    arguments: Mapping[Any, Any]
    implements_protocol: ImplementsProtocol

    def find_type_argument_mismatches(self) -> Iterator[str]:
        """Compare the type arguments in a class derived from the port with the expected ones."""
        own = find_type_arguments(self.cls, self.port)
        for variable, kind in self.arguments.items():
            if variable in own and not is_assignable(own[variable], kind, self.implements_protocol):
                yield f"is a {type_name(self.port)} of {type_name(own[variable])}, not of {type_name(kind)}"

    def find_member_mismatches(self, member: str) -> Iterator[str]:
        """Yield how the class's member differs from the port's."""
        expected = inspect.getattr_static(self.port, member, None)
        if inspect.isfunction(expected):
            yield from self._find_method_mismatches(expected, member)
        elif not _has_member(self.cls, member):
            yield f"has no {member}"
        elif inspect.isfunction(inspect.getattr_static(self.cls, member, None)):
            yield f"has a method {member}(), but the port has an attribute"
        else:
            own_type, kind = (
                _read_member_type(self.cls, member),
                substitute_type_variables(_read_member_type(self.port, member), self.arguments),
            )
            if not is_assignable(own_type, kind, self.implements_protocol):
                yield f"has a {member} that is {type_name(own_type)}, not {type_name(kind)}"

    def _find_method_mismatches(self, expected: Any, member: str) -> Iterator[str]:
        """Yield why the class has no such method, or can't be called like the port's."""
        implementation = inspect.getattr_static(self.cls, member, None)
        if isinstance(implementation, property | functools.cached_property):
            yield f"has an attribute {member}, but the port has a method"
        elif implementation is None:
            if not _has_member(self.cls, member):
                yield f"has no {member}()"
        elif inspect.isfunction(implementation) and (
            reason := find_call_mismatch(implementation, expected)
            or self._find_annotation_mismatch(implementation, expected)
        ):
            yield reason

    def _find_annotation_mismatch(self, method: Any, expected: Any) -> str:
        """Return the first type mismatch between a method and the port. Empty if all match."""
        own_types, port_types = _read_type_hints(method), _read_type_hints(expected)
        for parameter, open_kind in port_types.items():
            kind = substitute_type_variables(open_kind, self.arguments)
            if parameter == "return" and not is_assignable(
                own_types.get(parameter, Any), kind, self.implements_protocol
            ):
                return f"returns {type_name(own_types[parameter])} from {method.__name__}(), not {type_name(kind)}"
            if parameter != "return" and not is_assignable(
                kind, own_types.get(parameter, Any), self.implements_protocol
            ):
                own = type_name(own_types[parameter])
                return f"accepts {own} as {parameter} of {method.__name__}(), not {type_name(kind)}"
        return ""


def _has_member(cls: type, member: str) -> bool:
    fields = {field.name for field in attrs.fields(cls)} if attrs.has(cls) else set()
    return member in fields or hasattr(cls, member) or any(member in inspect.get_annotations(b) for b in cls.__mro__)


def _read_member_type(cls: type, member: str) -> Any:
    """Return an attribute's or property's annotated type, or Any without annotation."""
    member_object = inspect.getattr_static(cls, member, None)
    if isinstance(member_object, property):
        return _read_type_hints(member_object.fget).get("return", Any)
    if isinstance(member_object, functools.cached_property):
        return _read_type_hints(member_object.func).get("return", Any)
    try:
        return read_annotations(cls, {member}).get(member, Any)
    except (NameError, TypeError):
        return Any


def _read_type_hints(function: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        return {}


def type_name(kind: Any) -> str:
    """Return a type's name for messages."""
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


Call = tuple[list[str], dict[str, str]]
"""Positional and keyword arguments of a trial call. Each value names the parameter it is meant for."""

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
EXTRA_ARGUMENTS = ("",) * 20
"""Positional arguments for a parameter *args: more than any method names."""

STARRED = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def find_call_mismatch(method: Callable[..., Any], expected: Callable[..., Any]) -> str:
    """
    Return why `method` can't be called like `expected`. Both signatures are compared without `self`. Empty if it can.
    """
    own, port_signature = (
        Signature([*inspect.signature(function).parameters.values()][1:]) for function in (method, expected)
    )
    if not all(_accepts_call(own, call, port_signature) for call in _generate_allowed_calls(port_signature)):
        name, parameters = expected.__name__, _format_parameters(port_signature)
        return f"has a {name}({_format_parameters(own)}) that can't be called as {name}({parameters})"
    if inspect.iscoroutinefunction(method) != inspect.iscoroutinefunction(expected):
        return f"has {expected.__name__}() {'as' if inspect.iscoroutinefunction(method) else 'not as'} a coroutine"
    return ""


def _generate_allowed_calls(signature: Signature) -> Iterator[Call]:
    """Yield calls allowed by a signature: every number of positional arguments, with and without optional keywords."""
    parameters = signature.parameters.values()
    positional = [parameter for parameter in parameters if parameter.kind in POSITIONAL]
    for number in range(len(positional) + 1):
        # A required positional-only parameter can't be passed by keyword.
        if any(p.kind is Parameter.POSITIONAL_ONLY and _is_required(p) for p in positional[number:]):
            continue
        names = [p for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
        names += [p for p in positional[number:] if p.kind is not Parameter.POSITIONAL_ONLY]
        needed, all_names = ({p.name: p.name for p in names if whole or _is_required(p)} for whole in (False, True))
        by_position = [p.name for p in positional[:number]]
        yield by_position, needed
        yield by_position, all_names
    if any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters):
        yield [*by_position, *EXTRA_ARGUMENTS], needed
        yield [*by_position, *EXTRA_ARGUMENTS], all_names
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        yield by_position, needed | {"a keyword that no parameter has": ""}


def _is_required(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty


def _accepts_call(signature: Signature, call: Call, port_signature: Signature) -> bool:
    """Return whether a signature accepts a call and binds every argument to the intended parameter."""
    try:
        bound = signature.bind(*call[0], **call[1]).arguments
    except TypeError:
        return False
    renamed = {p.name for p in port_signature.parameters.values() if p.kind is Parameter.POSITIONAL_ONLY}
    starred = {p.name for p in signature.parameters.values() if p.kind in STARRED}
    return all(value in (name, "") or value in renamed for name, value in bound.items() if name not in starred)


def _format_parameters(signature: Signature) -> str:
    bare = [parameter.replace(annotation=Parameter.empty) for parameter in signature.parameters.values()]
    return str(Signature(bare))[1:-1]
