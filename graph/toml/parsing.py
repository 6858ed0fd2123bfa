"""Parse the bytes of a file as TOML. Errors have the position where the mistake begins, and a likely correction."""

import re
import unicodedata
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

import tomli

from drawloom.graph.garbage import pause_garbage_collection
from drawloom.graph.problems import KeyPath, Position, Problem, RecipeError
from drawloom.graph.toml.emit import dump_toml
from drawloom.graph.toml.positions import SourceMap

MAX_FILE_BYTES = 1 << 20
"""Bytes of a recipe file; larger files are refused."""

MAX_KEY_PARTS = 32
"""Parts of a dotted key. tomli's time grows with their square: 500 keys with 900 parts, half a megabyte, take 9 s."""

MAX_DEPTH = 32
"""Nested arrays and tables. With this limit, all code that walks a recipe may recurse."""

MAX_DIGITS = 64
"""Digits of a number. Python converts decimal numbers with up to 4300 digits, hexadecimal ones without a limit."""

MARK = "\x00mark"
"""A key that no recipe uses. Appended to a text, it shows which table the next line would belong to."""

MAX_TRIES = 20
"""Quotes that are tried as the start of an unterminated string. Every try parses the text, so more would be slow."""

MAX_LINE_LENGTH = 1000
"""Characters of a line; longer lines get no hint about their value."""

_TEXT = r"""\"{3}(?:[^\\]|\\[\s\S])*?\"{3}|'{3}[\s\S]*?'{3}|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+'|#[^\n]*+"""
"""Strings and comments. The patterns below skip them: their content may look like keys, brackets or numbers."""

_PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
_DOTS = rf"[ \t]*+({_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{MAX_KEY_PARTS},}}+)[ \t]*+[=\]]"
_LONG_KEY = re.compile(rf"(?:^|[\[{{,]){_DOTS}|{_TEXT}", re.MULTILINE)
BRACKET = re.compile(rf"[\[\]{{}}]|{_TEXT}")
_BARE_VALUE = re.compile(
    rf"""\s*{_PART}(?:[ \t]*\.[ \t]*{_PART})*\s*=\s*(?P<value>[^\s"'#\[{{=][^"'#={{}}]*?)\s*(?:#.*)?"""
)
_BARE_ITEM = re.compile(r"""[^\s"'#=,\[\]{}]+""")
_WORD = re.compile(r"[^\W\d_]{2}|/|^[^\W\d]|^[@$~.]")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
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


class SyntaxDiagnosis(NamedTuple):
    """Message about a syntax error, the offset where the mistake began (not where tomli gave up), and a hint."""

    message: str
    offset: int
    hint: str


def diagnose_syntax_error(text: str, error: tomli.TOMLDecodeError) -> SyntaxDiagnosis:
    """Return the diagnosis of a syntax error in a text."""
    word = re.match(r"[A-Za-z]+", text[error.pos :])
    if error.msg == "Invalid value" and word and word[0] in ("True", "False", "None", "null"):
        hint = "leave the key out: TOML has no such value" if word[0][0] in "Nn" else f"write {word[0].lower()}"
        return SyntaxDiagnosis(f"{word[0]} is not a TOML value", error.pos, hint)
    if (error.msg == "Cannot overwrite a value" or error.msg.endswith("twice")) and (
        duplicate := _diagnose_duplicate_key(text, error)
    ):
        return duplicate
    if error.msg == "Unterminated string" or error.msg in ('Expected "\'"', "Expected \"'''\"", 'Expected \'"""\''):
        return SyntaxDiagnosis(
            "unterminated string", _find_unterminated_string(text, error.pos), "close it with the quotes that opened it"
        )
    is_value = error.msg == "Invalid value" or error.msg.startswith("Expected newline")
    hint = _suggest_valid_value(text, error.pos) if is_value else ""
    return SyntaxDiagnosis(
        f"this is not TOML: {error.msg}", error.pos, hint or _explain_unexpected_character(text, error.pos)
    )


def _suggest_valid_value(text: str, at: int) -> str:
    """Return a correction for a value at an offset without quotes or with a decimal comma. Empty if there is none."""
    start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
    line = text[start : len(text) if end < 0 else end]
    if len(line) > MAX_LINE_LENGTH:
        return ""
    if assignment := _BARE_VALUE.fullmatch(line):
        value = assignment["value"]
        if _DECIMAL_COMMA.fullmatch(value):
            return f"write {value.replace(',', '.')}: decimals have a point"
    elif bare_item := _BARE_ITEM.match(text, at):
        value = bare_item[0]
    else:
        return ""
    return f"strings need quotes: write {dump_toml(value)}" if _WORD.search(value) else ""


def _explain_unexpected_character(text: str, at: int) -> str:
    """Return a correction for an unexpected character."""
    letter = text[at : at + 1]
    if letter == ":" or text.startswith("---", at - 3):
        return "TOML writes key = value, below a [table]"
    if letter == "{":
        return "this looks like JSON; TOML writes key = value, below a [table]"
    if letter > "\x7f":
        return f"{letter!a} is {unicodedata.name(letter, 'no letter')}; put quotes around text that contains it"
    return ""


def _diagnose_duplicate_key(text: str, error: tomli.TOMLDecodeError) -> SyntaxDiagnosis | None:
    """Return the diagnosis of a duplicate key: its second offset, and a hint with the line of the first."""
    start = text.rfind("\n", 0, error.pos) + 1
    before, line = text[:start], text[start:].partition("\n")[0]
    path: KeyPath = next(_find_key_path(line, before), ())
    source_map = SourceMap(before)
    first = source_map.key_range(path) or source_map.value_range(path) if path else None
    if first is None:
        return None
    return SyntaxDiagnosis(
        f"{path[-1]!r} is set twice", start, f"it is set on line {source_map.line_and_column(first.start)[0]} already"
    )


def _find_key_path(line: str, before: str) -> Iterator[KeyPath]:
    """Yield the full path of the key on a line, or nothing if it can't be determined."""
    with suppress(tomli.TOMLDecodeError, RecursionError, ValueError):
        if header := re.match(r"\s*\[\[?(.*?)\]", line):
            yield tuple(_find_path_down(tomli.loads(f"[{header[1]}]")))
            return
        here = tuple(_find_path_down(tomli.loads(f'{before}\n"\\u0000mark" = 0'), MARK))[:-1]
        key = line.partition("=")[0]
        yield (*here, *_find_path_down(tomli.loads(f"{key} = 0")))


def _find_path_down(tree: Any, mark: str = "") -> Iterator[str | int]:
    """Yield the path down a tree: to the mark if one is passed, or else through tables with a single key."""
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


def _find_unterminated_string(text: str, end: int) -> int:
    """Return the offset where an unterminated string begins: the last quotes after which only a string is missing."""
    for quotes in list(re.finditer(r"\"\"\"|'''|[\"']", text[:end]))[: -MAX_TRIES - 1 : -1]:
        if _is_valid_prefix(f'{text[: quotes.start()]}""'):
            return quotes.start()
    return end


def _is_valid_prefix(text: str) -> bool:
    """Return whether a text is TOML, or could be continued to TOML."""
    try:
        tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        return error.pos >= len(text)
    except (RecursionError, ValueError):
        return False
    return True
