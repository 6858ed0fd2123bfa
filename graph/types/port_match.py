"""Whether a class implements a port: the same members, of assignable types, callable with the same arguments."""

import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from inspect import Parameter, Signature
from typing import Any

import attrs

from drawloom.graph.types.assignable import Fits, find_type_arguments, is_assignable, substitute

# Attributes that typing adds to every Protocol, which are no members; they differ between Python versions.
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
    """Why a class does not implement a port, which may be generic with type arguments; empty if it does."""
    return list(_find_mismatches(frozenset(), cls, port))


@functools.cache  # classes do not change, and every edge of the same type asks for the same pair
def implements(cls: type, port: Any) -> bool:
    """Whether a class implements a port; stops at the first mismatch."""
    return _implements(frozenset(), cls, port)


@functools.cache
def implements_any(cls: type, ports: tuple[type, ...]) -> bool:
    """Whether a class implements one of several ports."""
    return any(implements(cls, port) for port in ports)


def _implements(asked: frozenset[tuple[type, Any]], cls: type, port: Any) -> bool:
    return next(_find_mismatches(asked, cls, port), None) is None


def _find_mismatches(asked: frozenset[tuple[type, Any]], cls: type, port: Any) -> Iterator[str]:
    """As `find_mismatches`; pairs in `asked` are assumed to match, so that recursive Protocols terminate."""
    if (cls, port) in asked:
        return
    plain, wanted = typing.get_origin(port) or port, find_type_arguments(port, port)
    matcher = _Matcher(cls, plain, wanted, functools.partial(_implements, asked | {(cls, port)}))
    if plain in cls.__mro__:
        yield from matcher.parameters()
    elif getattr(plain, "_is_protocol", False):
        for member in find_members(plain):
            yield from matcher.member(member)
    else:
        yield f"is not a {plain.__name__}"


@functools.cache  # ports do not change
def find_members(port: type) -> tuple[str, ...]:
    """The members of a Protocol and its bases, in the order of their definition."""
    found: dict[str, None] = {}
    for cls in reversed(port.__mro__):
        if getattr(cls, "_is_protocol", False) and cls is not typing.Protocol:
            names = [*inspect.get_annotations(cls), *vars(cls)]
            found |= dict.fromkeys(name for name in names if name not in PROTOCOL_ATTRIBUTES)
    return tuple(found)


@attrs.frozen
class _Matcher:
    """Compares one class with one port, whose type variables have the arguments `wanted`."""

    cls: type
    port: type
    wanted: Mapping[Any, Any]
    fits: Fits

    def parameters(self) -> Iterator[str]:
        """Type arguments of a class that derives from the port, where they are not those that are wanted."""
        ours = find_type_arguments(self.cls, self.port)
        for variable, kind in self.wanted.items():
            if variable in ours and not is_assignable(ours[variable], kind, self.fits):
                yield f"is a {type_name(self.port)} of {type_name(ours[variable])}, not of {type_name(kind)}"

    def member(self, member: str) -> Iterator[str]:
        """Why one member does not match the protocol."""
        promised = inspect.getattr_static(self.port, member, None)
        if inspect.isfunction(promised):
            yield from self._method(promised, member)
        elif not _has_member(self.cls, member):
            yield f"has no {member}"
        elif inspect.isfunction(inspect.getattr_static(self.cls, member, None)):
            yield f"has a method {member}(), where the port has an attribute"
        else:
            given, kind = (
                _read_member_type(self.cls, member),
                substitute(_read_member_type(self.port, member), self.wanted),
            )
            if not is_assignable(given, kind, self.fits):
                yield f"has a {member} that is {type_name(given)}, not {type_name(kind)}"

    def _method(self, promised: Any, member: str) -> Iterator[str]:
        given = inspect.getattr_static(self.cls, member, None)
        if isinstance(given, property | functools.cached_property):
            yield f"has an attribute {member}, where the port has a method"
        elif given is None:
            if not _has_member(self.cls, member):
                yield f"has no {member}()"
        elif inspect.isfunction(given) and (
            reason := find_call_mismatch(given, promised) or self._mistyped(given, promised)
        ):
            yield reason

    def _mistyped(self, given: Any, promised: Any) -> str:
        """Why the types of a method do not match the port; empty if they do."""
        ours, theirs = _read_type_hints(given), _read_type_hints(promised)
        for parameter, open_kind in theirs.items():
            kind = substitute(open_kind, self.wanted)
            if parameter == "return" and not is_assignable(ours.get(parameter, Any), kind, self.fits):
                return f"returns {type_name(ours[parameter])} from {given.__name__}(), not {type_name(kind)}"
            if parameter != "return" and not is_assignable(kind, ours.get(parameter, Any), self.fits):
                return f"takes {type_name(ours[parameter])} as {parameter} of {given.__name__}(), not {type_name(kind)}"
        return ""


def _has_member(cls: type, member: str) -> bool:
    fields = {field.name for field in attrs.fields(cls)} if attrs.has(cls) else set()
    return member in fields or hasattr(cls, member) or any(member in inspect.get_annotations(b) for b in cls.__mro__)


def _read_member_type(cls: type, member: str) -> Any:
    """The annotated type of an attribute or property; Any without annotation."""
    found = inspect.getattr_static(cls, member, None)
    if isinstance(found, property):
        return _read_type_hints(found.fget).get("return", Any)
    if isinstance(found, functools.cached_property):
        return _read_type_hints(found.func).get("return", Any)
    return _read_type_hints(cls).get(member, Any)


def _read_type_hints(thing: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(thing)
    except (NameError, TypeError):
        return {}


def type_name(kind: Any) -> str:
    """A type as messages show it."""
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")


Call = tuple[list[str], dict[str, str]]
"""Positional and keyword arguments of a trial call; each value is the name of the parameter that it is meant for."""

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
EXTRA_ARGUMENTS = ("",) * 20
"""Positional arguments for a parameter *args: more than any method names."""

STARRED = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)


def find_call_mismatch(given: Callable[..., Any], promised: Callable[..., Any]) -> str:
    """Why `given` can't be called like `promised`, both without `self`; empty if it can."""
    ours, theirs = (_signature_without_self(function) for function in (given, promised))
    if not all(_accepts_call(ours, call, theirs) for call in _generate_calls(theirs)):
        name = promised.__name__
        return f"has a {name}({_format_parameters(ours)}) that can't be called as {name}({_format_parameters(theirs)})"
    if inspect.iscoroutinefunction(given) != inspect.iscoroutinefunction(promised):
        return f"has {promised.__name__}() {'as' if inspect.iscoroutinefunction(given) else 'not as'} a coroutine"
    return ""


def _signature_without_self(function: Callable[..., Any]) -> Signature:
    return Signature([*inspect.signature(function).parameters.values()][1:])


def _generate_calls(signature: Signature) -> Iterator[Call]:
    """Calls that a signature allows: each number of positional arguments, with and without optional keywords."""
    parameters = signature.parameters.values()
    positional = [parameter for parameter in parameters if parameter.kind in POSITIONAL]
    for number in range(len(positional) + 1):
        # A required positional-only parameter can't be passed by keyword.
        if any(p.kind is Parameter.POSITIONAL_ONLY and _is_required(p) for p in positional[number:]):
            continue
        names = [p for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
        names += [p for p in positional[number:] if p.kind is not Parameter.POSITIONAL_ONLY]
        needed, all_names = ({p.name: p.name for p in names if whole or _is_required(p)} for whole in (False, True))
        by_place = [p.name for p in positional[:number]]
        yield by_place, needed
        yield by_place, all_names
    if any(parameter.kind is Parameter.VAR_POSITIONAL for parameter in parameters):
        yield [*by_place, *EXTRA_ARGUMENTS], needed
        yield [*by_place, *EXTRA_ARGUMENTS], all_names
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        yield by_place, needed | {"a keyword that no parameter has": ""}


def _is_required(parameter: Parameter) -> bool:
    return parameter.default is Parameter.empty


def _accepts_call(ours: Signature, call: Call, theirs: Signature) -> bool:
    """Whether a signature accepts a call and binds each argument to the parameter that it is meant for."""
    try:
        bound = ours.bind(*call[0], **call[1]).arguments
    except TypeError:
        return False
    renamed = {p.name for p in theirs.parameters.values() if p.kind is Parameter.POSITIONAL_ONLY}
    starred = {p.name for p in ours.parameters.values() if p.kind in STARRED}
    return all(value in (name, "") or value in renamed for name, value in bound.items() if name not in starred)


def _format_parameters(signature: Signature) -> str:
    bare = [parameter.replace(annotation=Parameter.empty) for parameter in signature.parameters.values()]
    return str(Signature(bare))[1:-1]
