"""Parse the bytes of a file as TOML. Errors have the position where the mistake begins, and a likely correction."""

import re
from collections.abc import Collection, Iterator
from itertools import chain
from typing import Any

import tomli

from drawloom.graph.garbage import pause_garbage_collection
from drawloom.graph.problems import Position, Problem, RecipeError
from drawloom.graph.toml.positions import PART

MAX_FILE_BYTES = 1 << 20
"""Bytes of a recipe file; larger files are refused."""

MAX_KEY_PARTS = 32
"""Parts of a dotted key. tomli's time grows with their square: 500 keys with 900 parts, half a megabyte, take 9 s."""

MAX_DEPTH = 32
"""Nested arrays and tables. With this limit, all code that walks a recipe may recurse."""

MAX_DIGITS = 64
"""Digits of a number. Python converts decimal numbers with up to 4300 digits, hexadecimal ones without a limit."""

_TEXT = r"""\"{3}(?:[^\\]|\\[\s\S])*?\"{3}|'{3}[\s\S]*?'{3}|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+'|#[^\n]*+"""
"""Strings and comments. The patterns below skip them: their content may look like keys, brackets or numbers."""

_DOTS = rf"[ \t]*+({PART}(?:[ \t]*+\.[ \t]*+{PART}){{{MAX_KEY_PARTS},}}+)[ \t]*+[=\]]"
_LONG_KEY = re.compile(rf"(?:^|[\[{{,]){_DOTS}|{_TEXT}", re.MULTILINE)
BRACKET = re.compile(rf"[\[\]{{}}]|{_TEXT}")
_NUMBER = re.compile(rf"(?<=[=\[,\s])([+-]?(?:0x)?[0-9a-fA-F_]{{{MAX_DIGITS},}})|{_TEXT}")


def decode(content: bytes) -> str:
    """Decode a file: UTF-8, with or without a byte order mark. Raises ValueError with the reason."""
    if len(content) > MAX_FILE_BYTES:
        raise ValueError("it is larger than 1 MiB, so it is not a recipe")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8-sig")
        line, column = _line_and_column(before, len(before))
        raise ValueError(f"line {line}, column {column} is not UTF-8") from error


@pause_garbage_collection()
def parse(text: str, source: str = "") -> dict[str, Any]:
    """Parse a TOML text into a tree. Raises RecipeError with one problem, positioned in `source`."""
    has_long = any(len(line) > 2 * MAX_KEY_PARTS and line.count(".") >= MAX_KEY_PARTS for line in text.split("\n"))
    if has_long and (long := _find_outside_strings(_LONG_KEY, text)) is not None:
        raise _syntax_error(source, text, long, f"a key has more than {MAX_KEY_PARTS} parts")
    try:
        data = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        from drawloom.graph.toml.diagnosis import diagnose_syntax_error  # few recipes have errors

        message, offset, hint = diagnose_syntax_error(text, error)
        raise _syntax_error(source, text, offset, message, hint) from error
    except RecursionError as error:
        raise _too_deep_nesting_error(source, text) from error
    except ValueError as error:  # a decimal number with more digits than Python converts
        raise _too_many_digits_error(source, text) from error
    for depth, parts in enumerate(_iterate_nesting_levels(data)):
        if depth > MAX_DEPTH:
            raise _too_deep_nesting_error(source, text)
        if [part for part in parts if type(part) is int and part.bit_length() > MAX_DIGITS * 4]:
            raise _too_many_digits_error(source, text)
    return data


def _syntax_error(source: str, text: str, offset: int, message: str, hint: str = "") -> RecipeError:
    line, column = _line_and_column(text, offset)
    return RecipeError([Problem("DL103", message, hint, position=Position(source, line, column))])


def _too_deep_nesting_error(source: str, text: str) -> RecipeError:
    depth, offset = 0, 0
    for bracket in BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(bracket[0], 0)
        if depth > MAX_DEPTH:
            offset = bracket.start()
            break
    return _syntax_error(source, text, offset, f"arrays and tables are nested more than {MAX_DEPTH} deep")


def _too_many_digits_error(source: str, text: str) -> RecipeError:
    return _syntax_error(
        source, text, _find_outside_strings(_NUMBER, text) or 0, f"a number has more than {MAX_DIGITS} digits"
    )


def _find_outside_strings(pattern: re.Pattern[str], text: str) -> int | None:
    """Return the offset where a pattern's group first matches outside strings and comments, or None."""
    return next((match.start(1) for match in pattern.finditer(text) if match[1] is not None), None)


def _iterate_nesting_levels(data: dict[str, Any]) -> Iterator[Collection[Any]]:
    """Yield the values at every depth in tables and arrays. Not recursive, because the depth may be great."""
    parts: Collection[Any] = data.values()
    while True:
        yield parts
        inside = [part.values() if type(part) is dict else part for part in parts if type(part) in (dict, list)]
        if not inside:
            return
        parts = list(chain.from_iterable(inside))


def _line_and_column(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)
