"""Types and values in the words of TOML, for messages and lists."""

import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import attrs
import tomli

from drawloom.graph.toml.emit import dumps

SHOWN = 40
"""Characters of a value that a message shows."""

TYPE_NAMES = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    Path: "path",
    datetime: "date-time",
    date: "date",
    time: "time",
    list: "array",
    tuple: "array",
    Sequence: "array",
    dict: "table",
    Mapping: "table",
    Any: "value",
    object: "value",
}


def describe(value: Any) -> str:
    """A value as a message names it: the string "x", the integer 3, true."""
    if value is None:
        return "nothing"
    noun = "" if type(value) is bool else TYPE_NAMES.get(type(value), "")
    return f"the {noun} {shorten(value)}" if noun else shorten(value)


def shorten(value: Any) -> str:
    """A value as TOML, as far as it fits into a message."""
    try:
        text = dumps(value)
    except (TypeError, ValueError):  # what Python made, and no TOML can
        text = ascii(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def describe_type(kind: Any) -> str:
    """A type: integer, array of strings, "first" or "last". That it may be left out is not said."""
    return _either(noun + rest for noun, rest in _alternatives(kind))


def expected(kind: Any) -> str:
    """The beginning of a message about something that is no `kind`."""
    return "expected " + _either(_article(noun) + noun + rest for noun, rest in _alternatives(kind))


def union_members(union: Any) -> list[Any]:
    """What a union allows but None, or the type itself if it is no union."""
    if typing.get_origin(union) not in (typing.Union, types.UnionType):
        return [union]
    return [member for member in typing.get_args(union) if member is not type(None)]


def _alternatives(kind: Any) -> list[tuple[str, str]]:
    """Each thing that a type allows: its noun, which is empty for a certain value, and what follows the noun."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in TYPE_NAMES:
        return [(TYPE_NAMES[kind], "")]
    if origin is Literal:
        return [("", shorten(choice)) for choice in inner]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [("", shorten(member.value)) for member in kind]
    if union_members(kind) != [kind]:
        return list(dict.fromkeys(words for member in union_members(kind) for words in _alternatives(member)))
    if origin in (list, tuple, Sequence):
        return [("array", _items(inner, origin is tuple and inner[-1:] != (...,)))]
    if origin in (dict, Mapping):
        return [("table", _of(inner[1]))]
    if attrs.has(kind):
        return [("table", " with " + ", ".join(field.alias for field in attrs.fields(kind) if field.init))]
    return [(getattr(kind, "__name__", str(kind)), "")]


def _items(kinds: tuple[Any, ...], fixed: bool) -> str:
    if not fixed:
        return _of(kinds[0])
    if len(kinds) > 1 and len(set(kinds)) == 1:
        return f" of {len(kinds)} {_plural(kinds[0])}"
    return f" [{', '.join(map(describe_type, kinds))}]"


def _of(kind: Any) -> str:
    return "" if kind in (Any, object) else f" of {_plural(kind)}"


def _plural(kind: Any) -> str:
    return _either(f"{noun}s{rest}" if noun else rest for noun, rest in _alternatives(kind))


def _article(noun: str) -> str:
    return "" if not noun else "an " if noun[0] in "aeiou" else "a "


def _either(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def near_misses(value: Any) -> Iterator[tuple[Any, str]]:
    """Values of other types that it nearly is, each with the hint what to write then."""
    try:
        text = dumps(value)
    except (TypeError, ValueError):  # no TOML
        return
    if isinstance(value, str):
        for bare in (value, value.lower()):
            yield from ((meant, f"write {bare} without quotes") for meant in _read(bare))
    elif not isinstance(value, list | dict):
        yield text, f"write {dumps(text)}"
    if isinstance(value, float) and value.is_integer():
        yield int(value), f"write {int(value)}"
    if type(value) is int and value in (0, 1):
        yield bool(value), f"write {str(bool(value)).lower()}"
    if not isinstance(value, list):
        yield [value], f"write [{text}]"
    elif len(value) == 1:
        yield value[0], f"write {text[1:-1]} without brackets"


def _read(text: str) -> list[Any]:
    """The value that a text is in TOML, if it is one; what can't be printed is no part of a hint."""
    try:
        return [tomli.loads(f"x = {text}")["x"]] if text.isprintable() else []
    except (ValueError, RecursionError):
        return []
