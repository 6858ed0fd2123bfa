"""Types and values in the words of TOML, for messages and lists."""

import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import attrs

from drawloom.graph.toml import emit

SHOWN = 40
"""Characters of a value that a message shows."""

NOUNS = {
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
    noun = "" if type(value) is bool else NOUNS.get(type(value), "")
    return f"the {noun} {shorten(value)}" if noun else shorten(value)


def shorten(value: Any) -> str:
    """A value as TOML, as far as it fits into a message."""
    try:
        text = emit.dumps(value)
    except (TypeError, ValueError):  # what Python made, and no TOML can
        text = ascii(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def describe_type(kind: Any) -> str:
    """A type: integer, array of strings, "first" or "last". That it may be left out is not said."""
    return _either(noun + rest for noun, rest in _alternatives(kind))


def expected(kind: Any) -> str:
    """The beginning of a message about something that is no `kind`."""
    return "expected " + _either(_article(noun) + noun + rest for noun, rest in _alternatives(kind))


def members(union: Any) -> list[Any]:
    """What a union allows but None, or the type itself if it is no union."""
    if typing.get_origin(union) not in (typing.Union, types.UnionType):
        return [union]
    return [member for member in typing.get_args(union) if member is not type(None)]


def _alternatives(kind: Any) -> list[tuple[str, str]]:
    """Each thing that a type allows: its noun, which is empty for a certain value, and what follows the noun."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in NOUNS:
        return [(NOUNS[kind], "")]
    if origin is Literal:
        return [("", shorten(choice)) for choice in inner]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [("", shorten(member.value)) for member in kind]
    if members(kind) != [kind]:
        return list(dict.fromkeys(words for member in members(kind) for words in _alternatives(member)))
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
