"""Whether a class keeps the promises of a port: the same members, callable in the same way."""

import functools
import inspect
import typing
from collections.abc import Iterator
from typing import Any

import attrs

from drawloom.graph.assignable import assignable

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

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def misfits(cls: type, port: type) -> list[str]:
    """Why `cls` does not fit `port`; nothing if it does."""
    if port in cls.__mro__:
        return []
    if not getattr(port, "_is_protocol", False):
        return [f"is no {port.__name__}"]
    return [reason for name in members(port) for reason in _misfit(cls, port, name)]


def members(port: type) -> list[str]:
    """What a Protocol demands, in the order in which it is written."""
    found: dict[str, None] = {}
    for cls in reversed(port.__mro__):
        if getattr(cls, "_is_protocol", False) and cls is not typing.Protocol:
            names = [*inspect.get_annotations(cls), *vars(cls)]
            found |= dict.fromkeys(name for name in names if name not in OWN_OF_PROTOCOLS)
    return list(found)


def _misfit(cls: type, port: type, name: str) -> Iterator[str]:
    promised = inspect.getattr_static(port, name, None)
    if inspect.isfunction(promised):
        yield from _misfit_method(cls, promised, name)
    elif not _has(cls, name):
        yield f"has no {name}"
    elif not assignable(given := _value_type(cls, name), wanted := _value_type(port, name)):
        yield f"has a {name} that is {_shown(given)}, not {_shown(wanted)}"


def _misfit_method(cls: type, promised: Any, name: str) -> Iterator[str]:
    given = inspect.getattr_static(cls, name, None)
    if given is None:
        yield f"has no {name}()"
    elif inspect.isfunction(given) and (reason := _mismatch(given, promised) or _mistyped(given, promised)):
        yield reason


def _has(cls: type, name: str) -> bool:
    fields = {field.name for field in attrs.fields(cls)} if attrs.has(cls) else set()
    return name in fields or hasattr(cls, name) or any(name in inspect.get_annotations(base) for base in cls.__mro__)


def _value_type(cls: type, name: str) -> Any:
    """What reading a member gives, as far as it is annotated."""
    found = inspect.getattr_static(cls, name, None)
    if isinstance(found, property):
        return _hints(found.fget).get("return", Any)
    if isinstance(found, functools.cached_property):
        return _hints(found.func).get("return", Any)
    return _hints(cls).get(name, Any)


def _hints(thing: Any) -> dict[str, Any]:
    try:
        return typing.get_type_hints(thing)
    except (NameError, TypeError):
        return {}


def _mistyped(given: Any, promised: Any) -> str:
    """How the types of a method break its port's promise, or nothing."""
    ours, theirs = _hints(given), _hints(promised)
    for name, kind in theirs.items():
        if name == "return" and not assignable(ours.get(name, Any), kind):
            return f"gives {_shown(ours[name])} from {given.__name__}(), not {_shown(kind)}"
        if name != "return" and not assignable(kind, ours.get(name, Any)):
            return f"takes {_shown(ours[name])} as {name} of {given.__name__}(), not {_shown(kind)}"
    return ""


def _mismatch(given: Any, promised: Any) -> str:
    """How a method can't be called as its port says, or nothing."""
    ours, theirs = (list(inspect.signature(function).parameters.values())[1:] for function in (given, promised))
    by_name = {parameter.name: parameter for parameter in ours}
    starred = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in ours)
    missing = any(parameter.name not in by_name and not starred for parameter in theirs)
    known = {parameter.name for parameter in theirs}
    extra = any(p.name not in known and p.kind in NAMED and p.default is inspect.Parameter.empty for p in ours)
    positional = [p.name for p in theirs if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    order = [p.name for p in ours if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD][: len(positional)]
    if missing or extra or (not starred and order != positional):
        return f"has a {given.__name__}({_names(ours)}) that can't be called as {given.__name__}({_names(theirs)})"
    return ""


def _names(parameters: list[inspect.Parameter]) -> str:
    return ", ".join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters)


def _shown(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
