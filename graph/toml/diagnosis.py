"""Diagnose syntax errors of TOML: where the mistake begins, and a likely correction."""

import re
import unicodedata
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import tomli

from drawloom.graph.problems import KeyPath
from drawloom.graph.toml.emit import dump_toml
from drawloom.graph.toml.positions import PART, SourceMap

MARK = "\x00mark"
"""A key without a use in any recipe. Appended to a text, it shows which table the next line would belong to."""

MAX_TRIES = 20
"""Quotes tried as the start of an unterminated string. Every try parses the text, so more would be slow."""

MAX_LINE_LENGTH = 1000
"""Characters of a line; longer lines get no hint about their value."""

_BARE_VALUE = re.compile(
    rf"""\s*{PART}(?:[ \t]*\.[ \t]*{PART})*\s*=\s*(?P<value>[^\s"'#\[{{=][^"'#={{}}]*?)\s*(?:#.*)?"""
)
_BARE_ITEM = re.compile(r"""[^\s"'#=,\[\]{}]+""")
_WORD = re.compile(r"[^\W\d_]{2}|/|^[^\W\d]|^[@$~.]")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")


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
