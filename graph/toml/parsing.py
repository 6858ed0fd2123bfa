"""From the bytes of a file to a TOML tree, refusing at once what no person wrote and what would take long to read."""

import re
from collections.abc import Iterator
from typing import Any

import attrs
import tomli

from drawloom.graph.toml.diagnostics import explain_fault

LARGEST = 1 << 20
"""Bytes of a recipe file; one that is larger is no recipe."""

PARTS = 32
"""Parts of a dotted key. tomli's time grows with their square: 500 keys of 900 parts, half a megabyte, take 9 s."""

DEPTH = 32
"""Arrays and tables inside one another; all that walks a recipe may then recurse."""

DIGITS = 64
"""Digits of a number. Python reads decimal ones of up to 4300 digits, others without end."""

_TEXT = r"""\"{3}(?:[^\\]|\\[\s\S])*?\"{3}|'{3}[\s\S]*?'{3}|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+'|#[^\n]*+"""
"""Strings and comments: what looks like a key in them is none."""

_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_DOTS = rf"[ \t]*+({_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{PARTS},}}+)[ \t]*+[=\]]"
_LONG_KEY = re.compile(rf"(?:^|[\[{{,]){_DOTS}|{_TEXT}", re.MULTILINE)
_BRACKET = re.compile(rf"[\[\]{{}}]|{_TEXT}")
_NUMBER = re.compile(rf"(?<=[=\[,\s])([+-]?(?:0x)?[0-9a-fA-F_]{{{DIGITS},}})|{_TEXT}")


@attrs.frozen
class Unreadable(Exception):
    """Why a text is no recipe, and where; line and column count from 1, in code points."""

    text: str
    line: int = 1
    column: int = 1
    hint: str = ""


def decode(content: bytes) -> str:
    """The text of a file: UTF-8, with or without a mark of byte order. Raises Unreadable."""
    if len(content) > LARGEST:
        raise Unreadable("it is larger than 1 MiB, so it is no recipe")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8-sig")
        raise Unreadable("this is not UTF-8", *_position(before, len(before))) from error


def parse(text: str) -> dict[str, Any]:
    """The tree of a text that tomli accepts. Raises Unreadable."""
    has_dots = any(line.count(".") >= PARTS for line in text.split("\n"))  # else there is no need to look closely
    if has_dots and (long := _first(_LONG_KEY, text)) is not None:
        raise Unreadable(f"a key of more than {PARTS} parts", *_position(text, long))
    try:
        data = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        fault, offset, hint = explain_fault(text, error)
        raise Unreadable(fault, *_position(text, offset), hint) from error
    except RecursionError as error:
        raise _too_deep(text) from error
    except ValueError as error:  # a decimal number of more digits than Python reads
        raise _too_long(text) from error
    for depth, value in _walk(data):
        if depth > DEPTH:
            raise _too_deep(text)
        if type(value) is int and value.bit_length() > DIGITS * 4:
            raise _too_long(text)
    return data


def _too_deep(text: str) -> Unreadable:
    depth, at = 0, 0
    for found in _BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > DEPTH:
            at = found.start()
            break
    return Unreadable(f"arrays and tables are nested more than {DEPTH} deep", *_position(text, at))


def _too_long(text: str) -> Unreadable:
    return Unreadable(f"a number of more than {DIGITS} digits", *_position(text, _first(_NUMBER, text) or 0))


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    """Where a pattern's group is found first; strings and comments are passed over."""
    return next((found.start(1) for found in pattern.finditer(text) if found[1] is not None), None)


def _walk(data: Any) -> Iterator[tuple[int, Any]]:
    """Every value that is inside, with its depth; without recursion."""
    stack = [(0, data)]
    while stack:
        depth, value = stack.pop()
        yield depth, value
        if isinstance(value, dict):
            stack += [(depth + 1, part) for part in value.values()]
        elif isinstance(value, list):
            stack += [(depth + 1, part) for part in value]


def _position(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)
