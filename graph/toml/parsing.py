"""Parses the bytes of a file as TOML; errors have the position where the mistake began, and a likely correction."""

import re
import unicodedata
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import tomli

from drawloom.graph.garbage import paused_collection
from drawloom.graph.problems import KeyPath, Place, Problem, RecipeError
from drawloom.graph.toml.emit import dumps
from drawloom.graph.toml.positions import SourceMap

LARGEST = 1 << 20
"""Bytes of a recipe file; a larger file is refused."""

PARTS = 32
"""Parts of a dotted key. tomli's time grows with their square: 500 keys of 900 parts, half a megabyte, take 9 s."""

DEPTH = 32
"""Nested arrays and tables; with this limit, everything that walks a recipe may recurse."""

DIGITS = 64
"""Digits of a number. Python converts decimal numbers of up to 4300 digits, hexadecimal ones without a limit."""

MARK = "\x00mark"
"""A key that no recipe uses: appended to a text, it shows into which table the next line would go."""

TRIES = 20
"""Quotes that are tried as the start of an unterminated string; each try parses the text, so more would be slow."""

LONGEST_LINE = 1000
"""Characters of a line of which the value is looked at for a hint."""

_TEXT = r"""\"{3}(?:[^\\]|\\[\s\S])*?\"{3}|'{3}[\s\S]*?'{3}|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+'|#[^\n]*+"""
"""Strings and comments, which the patterns below skip: their content may look like keys, brackets or numbers."""

_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_DOTS = rf"[ \t]*+({_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{PARTS},}}+)[ \t]*+[=\]]"
_LONG_KEY = re.compile(rf"(?:^|[\[{{,]){_DOTS}|{_TEXT}", re.MULTILINE)
BRACKET = re.compile(rf"[\[\]{{}}]|{_TEXT}")
_BARE_VALUE = re.compile(
    rf"""\s*{_PART}(?:[ \t]*\.[ \t]*{_PART})*\s*=\s*(?P<value>[^\s"'#\[{{=][^"'#={{}}]*?)\s*(?:#.*)?"""
)
_BARE_ITEM = re.compile(r"""[^\s"'#=,\[\]{}]+""")
_WORD = re.compile(r"[^\W\d_]{2}|/|^[^\W\d]|^[@$~.]")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_NUMBER = re.compile(rf"(?<=[=\[,\s])([+-]?(?:0x)?[0-9a-fA-F_]{{{DIGITS},}})|{_TEXT}")


def decode(content: bytes) -> str:
    """The text of a file: UTF-8, with or without a byte order mark. Raises ValueError, whose text says why."""
    if len(content) > LARGEST:
        raise ValueError("it is larger than 1 MiB, so it is no recipe")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start].decode("utf-8-sig")
        line, column = _position(before, len(before))
        raise ValueError(f"line {line}, column {column} is not UTF-8") from error


@paused_collection()
def parse(text: str, source: str = "") -> dict[str, Any]:
    """The tree of a TOML text. Raises RecipeError with one problem, placed in `source`."""
    has_long = any(len(line) > 2 * PARTS and line.count(".") >= PARTS for line in text.split("\n"))
    if has_long and (long := _first(_LONG_KEY, text)) is not None:
        raise _error(source, text, long, f"a key of more than {PARTS} parts")
    try:
        data = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        message, offset, hint = diagnose(text, error)
        raise _error(source, text, offset, message, hint) from error
    except RecursionError as error:
        raise _too_deep(source, text) from error
    except ValueError as error:  # a decimal number of more digits than Python converts
        raise _too_long(source, text) from error
    for depth, parts in enumerate(_levels(data)):
        if depth > DEPTH:
            raise _too_deep(source, text)
        if [part for part in parts if type(part) is int and part.bit_length() > DIGITS * 4]:
            raise _too_long(source, text)
    return data


def _error(source: str, text: str, offset: int, message: str, hint: str = "") -> RecipeError:
    line, column = _position(text, offset)
    return RecipeError([Problem("DL103", message, hint, place=Place(source, line, column))])


def _too_deep(source: str, text: str) -> RecipeError:
    depth, at = 0, 0
    for found in BRACKET.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(found[0], 0)
        if depth > DEPTH:
            at = found.start()
            break
    return _error(source, text, at, f"arrays and tables are nested more than {DEPTH} deep")


def _too_long(source: str, text: str) -> RecipeError:
    return _error(source, text, _first(_NUMBER, text) or 0, f"a number of more than {DIGITS} digits")


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    """The offset of the first match of a pattern's group outside strings and comments."""
    return next((found.start(1) for found in pattern.finditer(text) if found[1] is not None), None)


def _levels(data: dict[str, Any]) -> Iterator[Collection[Any]]:
    """The values at each depth of tables and arrays. Not recursive, since the depth may be great."""
    parts: Collection[Any] = data.values()
    while True:
        yield parts
        inside = [part.values() if type(part) is dict else part for part in parts if type(part) in (dict, list)]
        if not inside:
            return
        parts = list(chain.from_iterable(inside))


def _position(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


def diagnose(text: str, error: tomli.TOMLDecodeError) -> tuple[str, int, str]:
    """A syntax error as a message, the offset where the mistake began (not where tomli gave up), and a hint."""
    word = re.match(r"[A-Za-z]+", text[error.pos :])
    if error.msg == "Invalid value" and word and word[0] in ("True", "False", "None", "null"):
        meant = "leave the key out: TOML has no such value" if word[0][0] in "Nn" else f"write {word[0].lower()}"
        return f"{word[0]} is not a TOML value", error.pos, meant
    if (error.msg == "Cannot overwrite a value" or error.msg.endswith("twice")) and (twice := _twice(text, error)):
        return twice
    if error.msg == "Unterminated string" or error.msg in ('Expected "\'"', "Expected \"'''\"", 'Expected \'"""\''):
        return "unterminated string", _opening(text, error.pos), "close it with the quotes that opened it"
    is_value = error.msg == "Invalid value" or error.msg.startswith("Expected newline")
    hint = _suggest_value(text, error.pos) if is_value else ""
    return f"this is not TOML: {error.msg}", error.pos, hint or _suggest(text, error.pos)


def _suggest_value(text: str, at: int) -> str:
    """What to write instead of a value without quotes, or with a decimal comma; empty if there is none at an offset."""
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    line = text[start : len(text) if end < 0 else end]
    if len(line) > LONGEST_LINE:
        return ""
    if written := _BARE_VALUE.fullmatch(line):
        value = written["value"]
        if _DECIMAL_COMMA.fullmatch(value):
            return f"write {value.replace(',', '.')}: decimals have a point"
    elif within := _BARE_ITEM.match(text, at):
        value = within[0]
    else:
        return ""
    return f"strings need quotes: write {dumps(value)}" if _WORD.search(value) else ""


def _suggest(text: str, at: int) -> str:
    """What to write instead of an unexpected character."""
    letter = text[at : at + 1]
    if letter == ":" or text.startswith("---", at - 3):
        return "TOML writes key = value, below a [table]"
    if letter == "{":
        return "this looks like JSON; TOML writes key = value, below a [table]"
    if letter > "\x7f":
        return f"{letter!a} is {unicodedata.name(letter, 'no letter')}; such letters need quotes around them"
    return ""


def _twice(text: str, error: tomli.TOMLDecodeError) -> tuple[str, int, str] | None:
    """The diagnosis of a duplicate key: the offset of the second one, with the line of the first in the hint."""
    start = text.rfind("\n", 0, error.pos) + 1
    before, line = text[:start], text[start:].partition("\n")[0]
    path: KeyPath = next(_paths(line, before), ())
    places = SourceMap(before)
    first = places.key(path) or places.value(path) if path else None
    if first is None:
        return None
    return f"{path[-1]!r} is set twice", start, f"it is set on line {places.position(first.start)[0]} already"


def _paths(line: str, before: str) -> Iterator[KeyPath]:
    """The full path of the key that a line sets, or nothing if it can't be determined."""
    with suppress(tomli.TOMLDecodeError, RecursionError, ValueError):
        if header := re.match(r"\s*\[\[?(.*?)\]", line):
            yield tuple(_only(tomli.loads(f"[{header[1]}]")))
            return
        here = tuple(_only(tomli.loads(f'{before}\n"\\u0000mark" = 0'), MARK))[:-1]
        key = line.partition("=")[0]
        yield (*here, *_only(tomli.loads(f"{key} = 0")))


def _only(tree: Any, mark: str = "") -> Iterator[str | int]:
    """The path down a tree: to the mark if one is given, or else through tables with a single key."""
    trail: list[tuple[KeyPath, Any]] = [((), tree)]
    while trail:
        path, item = trail.pop()
        inside: list[tuple[str | int, Any]] = list(
            item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        )
        if (path and path[-1] == mark) or (not mark and not inside):
            yield from path
            return
        trail += [((*path, key), part) for key, part in inside]


def _opening(text: str, end: int) -> int:
    """Where an unterminated string begins: at the last quotes before which the text is valid."""
    for found in list(re.finditer(r"\"\"\"|'''|[\"']", text[:end]))[: -TRIES - 1 : -1]:
        if _is_valid_prefix(f'{text[: found.start()]}""'):
            return found.start()
    return end


def _is_valid_prefix(text: str) -> bool:
    """Whether a text is TOML, or would be if it continued."""
    try:
        tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        return error.pos >= len(text)
    except (RecursionError, ValueError):
        return False
    return True
