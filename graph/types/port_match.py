"""Whether a class keeps the promises of a port: the same members, of the same types, callable in the same way."""

import functools
import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from drawloom.graph.types.assignable import Fits, assignable, bindings, substitute
from drawloom.graph.types.signatures import call_mismatch

OWN_OF_PROTOCOLS = frozenset(dir(typing.Protocol)) | {
    "__abstractmethods__",
    "__annotations__",
    "__dict__",
    "__module__",
    "__non_callable_proto_members__",
    "__orig_bases__",
    "__parameters__",
    "__port__",
    "__protocol_attrs__",
    "__static_attributes__",
    "__firstlineno__",
    "__weakref__",
    "_is_protocol",
    "_is_runtime_protocol",
}


def mismatches(cls: type, port: Any) -> list[str]:
    """Why a class does not fit a port, which may be a generic one with its parameters; nothing if it does."""
    return list(_mismatches(frozenset(), cls, port))


@functools.cache  # of classes, which do not change: the same pair is asked for by every edge
def implements(cls: type, port: Any) -> bool:
    """Whether there is no misfit; the first one settles it."""
    return _fits(frozenset(), cls, port)


def _fits(asked: frozenset[tuple[type, Any]], cls: type, port: Any) -> bool:
    return next(_mismatches(asked, cls, port), None) is None


def _mismatches(asked: frozenset[tuple[type, Any]], cls: type, port: Any) -> Iterator[str]:
    """The same, for classes that promise things of one another: what is `asked` already is taken to fit."""
    if (cls, port) in asked:
        return
    plain, wanted = typing.get_origin(port) or port, bindings(port, port)
    look = _Matcher(cls, plain, wanted, functools.partial(_fits, asked | {(cls, port)}))
    if plain in cls.__mro__:
        yield from look.parameters()
    elif getattr(plain, "_is_protocol", False):
        for member in members(plain):
            yield from look.member(member)
    else:
        yield f"is no {plain.__name__}"


@functools.cache  # of ports, which do not change
def members(port: type) -> tuple[str, ...]:
    """What a Protocol demands, in the order in which it is written."""
    found: dict[str, None] = {}
    for cls in reversed(port.__mro__):
        if getattr(cls, "_is_protocol", False) and cls is not typing.Protocol:
            names = [*inspect.get_annotations(cls), *vars(cls)]
            found |= dict.fromkeys(name for name in names if name not in OWN_OF_PROTOCOLS)
    return tuple(found)


@attrs.frozen
class _Matcher:
    """One class beside one port, whose type variables are as `wanted`."""

    cls: type
    port: type
    wanted: Mapping[Any, Any]
    fits: Fits

    def parameters(self) -> Iterator[str]:
        """How a class that derives from the port fills its variables in otherwise."""
        ours = bindings(self.cls, self.port)
        for variable, kind in self.wanted.items():
            if variable in ours and not assignable(ours[variable], kind, self.fits):
                yield f"is a {name(self.port)} of {name(ours[variable])}, not of {name(kind)}"

    def member(self, member: str) -> Iterator[str]:
        """How one member breaks its promise."""
        promised = inspect.getattr_static(self.port, member, None)
        if inspect.isfunction(promised):
            yield from self._method(promised, member)
        elif not _has(self.cls, member):
            yield f"has no {member}"
        elif inspect.isfunction(inspect.getattr_static(self.cls, member, None)):
            yield f"has a method {member}(), where a value is promised"
        else:
            given, kind = _value_type(self.cls, member), substitute(_value_type(self.port, member), self.wanted)
            if not assignable(given, kind, self.fits):
                yield f"has a {member} that is {name(given)}, not {name(kind)}"

    def _method(self, promised: Any, member: str) -> Iterator[str]:
        given = inspect.getattr_static(self.cls, member, None)
        if isinstance(given, property | functools.cached_property):
            yield f"has a value {member}, where a method is promised"
        elif given is None:
            if not _has(self.cls, member):
                yield f"has no {member}()"
        elif inspect.isfunction(given) and (
            reason := call_mismatch(given, promised) or self._mistyped(given, promised)
        ):
            yield reason

    def _mistyped(self, given: Any, promised: Any) -> str:
        """How the types of a method break its port's promise, or nothing."""
        ours, theirs = _hints(given), _hints(promised)
        for parameter, open_kind in theirs.items():
            kind = substitute(open_kind, self.wanted)
            if parameter == "return" and not assignable(ours.get(parameter, Any), kind, self.fits):
                return f"gives {name(ours[parameter])} from {given.__name__}(), not {name(kind)}"
            if parameter != "return" and not assignable(kind, ours.get(parameter, Any), self.fits):
                return f"takes {name(ours[parameter])} as {parameter} of {given.__name__}(), not {name(kind)}"
        return ""


def _has(cls: type, member: str) -> bool:
    fields = {field.name for field in attrs.fields(cls)} if attrs.has(cls) else set()
    return member in fields or hasattr(cls, member) or any(member in inspect.get_annotations(b) for b in cls.__mro__)


def _value_type(cls: type, member: str) -> Any:
    """What reading a member gives, as far as it is annotated."""
    found = inspect.getattr_static(cls, member, None)
    if isinstance(found, property):
        return _hints(found.fget).get("return", Any)
    if isinstance(found, functools.cached_property):
        return _hints(found.func).get("return", Any)
    return _hints(cls).get(member, Any)


def _hints(thing: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(thing)
    except (NameError, TypeError):
        return {}


def name(kind: Any) -> str:
    """A type as messages show it."""
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
