"""Whether a class keeps the promises of a port: the same members, callable in the same way."""

import inspect
import typing
from collections.abc import Iterator
from typing import Any

import attrs

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
    if not inspect.isfunction(promised):
        if not _has(cls, name):
            yield f"has no {name}"
        return
    given = inspect.getattr_static(cls, name, None)
    if given is None:
        yield f"has no {name}()"
    elif inspect.isfunction(given) and (reason := _mismatch(given, promised)):
        yield reason


def _has(cls: type, name: str) -> bool:
    fields = {field.name for field in attrs.fields(cls)} if attrs.has(cls) else set()
    return name in fields or hasattr(cls, name) or any(name in inspect.get_annotations(base) for base in cls.__mro__)


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
        return f"its {given.__name__}({_names(ours)}) can't be called as {given.__name__}({_names(theirs)})"
    return ""


def _names(parameters: list[inspect.Parameter]) -> str:
    return ", ".join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters)
