"""Misspelt capabilities: attributes with nearly the name of an optional member."""

import functools
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from difflib import get_close_matches
from types import ModuleType
from typing import Any

import attrs

from drawloom.graph import lifecycle
from drawloom.graph.component import is_port_or_component
from drawloom.graph.types.port_match import list_protocol_members

SIMILARITY = 0.8
"""Of two names, by difflib: `observe` and `observes` have 0.93, `end_on_every_rank` and `embeds_on_every_rank` 0.86."""


def describe_misspelt_members(cls: type, port: type) -> list[str]:
    """Return a sentence for each public attribute of a class whose name resembles that of an optional member."""
    declared, optional = _list_all_and_optional_port_members(re.sub(r"(\.ports)\..*", r"\1", port.__module__))
    similar = (
        (name, get_close_matches(name, optional, n=1, cutoff=SIMILARITY))
        for name in _list_public_names_except_settings(cls) - declared
    )
    return [
        f"{cls.__name__} has {name}, which no port declares; did you mean {other}?"
        for name, others in sorted(similar)
        for other in others
    ]


def _list_public_names_except_settings(cls: type) -> set[str]:
    """Return the public attributes of a class without its settings and without attributes from other packages."""
    fields = {field.name: field.init for field in attrs.fields(cls)} if attrs.has(cls) else {}
    package = cls.__module__.partition(".")[0]
    bases = [base for base in cls.__mro__ if base.__module__.partition(".")[0] == package]
    names = {*(name for base in bases for name in vars(base)), *fields}
    return {name for name in names if not name.startswith("_") and not fields.get(name)}


@functools.cache
def _list_all_and_optional_port_members(package: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return two sets, from a package's ports and `graph.lifecycle`: all members, and the optional members."""
    protocols = [cls for module in (*_import_modules(package), lifecycle) for cls in _iterate_protocols(module)]
    optional = [*find_capability_protocols(package), *find_capability_protocols(lifecycle.__name__)]
    names = {name for cls in optional for name in (*inspect.get_annotations(cls), *vars(cls))}
    declared = frozenset(name for cls in protocols for name in list_protocol_members(cls))
    return declared, declared & names


def find_capability_protocols(package: str) -> list[type]:
    """Return the Protocols of optional members in a module or package."""
    return [cls for module in _import_modules(package) for cls in _iterate_protocols(module) if _is_capability(cls)]


def _is_capability(protocol: Any) -> bool:
    """Return whether a Protocol is tested with isinstance, and either extends a port or is not a port itself."""
    extends = any(is_port_or_component(base) for base in protocol.__mro__[1:])
    return bool(protocol._is_runtime_protocol) and (extends or not is_port_or_component(protocol))


def _import_modules(package: str) -> Iterator[ModuleType]:
    module = importlib.import_module(package)
    yield module
    for item in pkgutil.iter_modules(getattr(module, "__path__", ()), f"{package}."):
        yield importlib.import_module(item.name)


def _iterate_protocols(module: ModuleType) -> Iterator[type]:
    for _, cls in inspect.getmembers(module, inspect.isclass):
        if cls.__module__ == module.__name__ and getattr(cls, "_is_protocol", False):
            yield cls
