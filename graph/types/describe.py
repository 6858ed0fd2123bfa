"""Names of types and values for messages, in TOML terms, and hints for values with nearly the right type."""

import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import attrs
import tomli

from drawloom.graph.toml.emit import dump_toml
from drawloom.graph.types.assignable import union_members_except_none

MAX_VALUE_LENGTH = 40
"""Length in characters at which messages cut a value."""

DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")

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
    """Return a value as messages show it: the string "x", the integer 3, true."""
    if value is None:
        return "nothing"
    noun = "" if type(value) is bool else TYPE_NAMES.get(type(value), "")
    return f"the {noun} {dump_shortened_toml(value)}" if noun else dump_shortened_toml(value)


def dump_toml_or_repr(value: Any) -> str:
    """Return a value as TOML, or as Python for values which TOML can't express."""
    try:
        return dump_toml(value)
    except (TypeError, ValueError):
        return ascii(value)


def dump_shortened_toml(value: Any) -> str:
    """Return a value as TOML, cut to MAX_VALUE_LENGTH characters."""
    text = dump_toml_or_repr(value)
    return text if len(text) <= MAX_VALUE_LENGTH else text[: MAX_VALUE_LENGTH - 3] + "..."


def describe_type(kind: Any) -> str:
    """Return a type as messages show it: integer, array of strings, "first" or "last". None in a union is omitted."""
    return _join_with_or(noun + rest for noun, rest in _list_nouns_with_rests(kind))


def make_ellipsis_placeholder(kind: Any) -> str:
    """Return the placeholder for a value in a line to complete: ... or ["..."]."""
    noun, rest = next(iter(_list_nouns_with_rests(kind)))
    if noun != "array":
        return "..."
    return '["..."]' if rest in (" of strings", " of paths") else "[...]"


def format_expected_type(kind: Any) -> str:
    """Start a message about a wrongly typed value, such as "expected an integer"."""
    return "expected " + _join_with_or(_article_for(noun) + noun + rest for noun, rest in _list_nouns_with_rests(kind))


def _list_nouns_with_rests(kind: Any) -> list[tuple[str, str]]:
    """Return a type's alternatives as (noun, rest), such as ("array", " of strings"). Literals have an empty noun."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in TYPE_NAMES:
        return [(TYPE_NAMES[kind], "")]
    if origin is Literal:
        return [("", dump_shortened_toml(choice)) for choice in inner]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [("", dump_shortened_toml(member.value)) for member in kind]
    if union_members_except_none(kind) != [kind]:
        return list(
            dict.fromkeys(
                words for member in union_members_except_none(kind) for words in _list_nouns_with_rests(member)
            )
        )
    if origin in (list, tuple, Sequence):
        return [("array", _describe_item_types(inner, origin is tuple and inner[-1:] != (...,)))]
    if origin in (dict, Mapping):
        return [("table", _describe_element_type(inner[1]))]
    if attrs.has(kind):
        return [("table", " with " + ", ".join(field.alias for field in attrs.fields(kind) if field.init))]
    return [(getattr(kind, "__name__", str(kind)), "")]


def _describe_item_types(kinds: tuple[Any, ...], fixed: bool) -> str:
    if not fixed:
        return _describe_element_type(kinds[0])
    if len(kinds) > 1 and len(set(kinds)) == 1:
        return f" of {len(kinds)} {_pluralize(kinds[0])}"
    return f" [{', '.join(map(describe_type, kinds))}]"


def _describe_element_type(kind: Any) -> str:
    return "" if kind in (Any, object) else f" of {_pluralize(kind)}"


def _pluralize(kind: Any) -> str:
    return _join_with_or(f"{noun}s{rest}" if noun else rest for noun, rest in _list_nouns_with_rests(kind))


def _article_for(noun: str) -> str:
    return "" if not noun else "an " if noun[0] in "aeiou" else "a "


def _join_with_or(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last


def find_near_misses_with_hints(value: Any) -> Iterator[tuple[Any, str]]:
    """Yield (value, hint) for values of other types that the user probably meant, such as 3 for "3"."""
    try:
        text = dump_toml(value)
    except (TypeError, ValueError):  # not a TOML value
        return
    if isinstance(value, str):
        if DECIMAL_COMMA.fullmatch(value):
            corrected = value.replace(",", ".")
            yield float(corrected), f"write {corrected}: decimals have a point"
        for bare in (value, value.lower()):
            yield from ((corrected, f"write {bare} without quotes") for corrected in _parse_value(bare))
    elif not isinstance(value, list | dict):
        yield text, f"write {dump_toml(text)}"
    if isinstance(value, float) and value.is_integer():
        yield int(value), f"write {int(value)}"
    if type(value) is int and value in (0, 1):
        yield bool(value), f"write {str(bool(value)).lower()}"
    if not isinstance(value, list):
        yield [value], f"write [{text}]"
    elif len(value) == 1:
        yield value[0], f"write {text[1:-1]} without brackets"


def _parse_value(text: str) -> list[Any]:
    """Parse a text as one TOML value. Return an empty list if it is invalid, or if a hint can't print it."""
    try:
        return [tomli.loads(f"x = {text}")["x"]] if text.isprintable() else []
    except (ValueError, RecursionError):
        return []
