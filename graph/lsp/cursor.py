"""
Classify a position in the text of a recipe: a part of a header, a key or a value, with its path.

The text before the position is completed to TOML with a mark and closing brackets, and parsed. So the rest of the text
does not matter, and need not be TOML.
"""

import re
from typing import Any, Literal

import attrs
import tomli

from drawloom.graph.problems import KeyPath
from drawloom.graph.toml.diagnosis import MARK
from drawloom.graph.toml.parsing import BRACKET
from drawloom.graph.toml.positions import SourceRange

Kind = Literal["header", "key", "value"]

_QUOTED = r"\"(?:[^\"\\\n]|\\.)*+\"?|'[^'\n]*+'?"
KEY = re.compile(rf"{_QUOTED}|[A-Za-z0-9_-]++")
"""A part of a key, whose closing quote may be missing."""

VALUE = re.compile(rf"{_QUOTED}|[^\s,\[\]{{}}=\"'#]++")
"""A value that is neither an array nor a table."""

MAX_BLANKED_LINES = 5
"""Lines above the position that are blanked because they are not TOML; every try parses the text."""

_CLOSING = {"[": "]", "{": "}"}

KEY_MARK_VALUE = 0
"""Value of the mark where it is a key."""


@attrs.frozen
class Cursor:
    """
    The token at a position, in the range [start, end) of the text. The range is empty where a token may be typed.

    `path` leads to the key or value; in a header or a dotted key, to the part at the position. `written` is the token
    without its quotes.
    """

    kind: Kind
    path: KeyPath
    start: int
    end: int
    written: str
    quoted: bool

    @classmethod
    def at(cls, text: str, offset: int) -> "Cursor | None":
        """Return the token around an offset or ending there, or None in comments and where TOML allows no token."""
        line_start = text.rfind("\n", 0, offset) + 1
        for pattern in (KEY, VALUE):
            start, end = _find_token_range(pattern, text, line_start, offset)
            token = text[start:end]
            context = _find_token_kind_and_path(text, start, line_start)
            if context is not None and (context[0] == "value") == (pattern is VALUE):
                kind, path = context
                written = _unquote(token)
                path = path if kind == "value" else (*path[:-1], written)
                return cls(kind, path, start, end, written, token.startswith(('"', "'")))
        return None


def _find_token_range(pattern: re.Pattern[str], text: str, line_start: int, offset: int) -> SourceRange:
    """Return the token's range around an offset, or an empty range."""
    end = text.find("\n", line_start)
    for match in pattern.finditer(text, line_start, len(text) if end < 0 else end):
        if match.start() <= offset <= match.end():
            return SourceRange(match.start(), match.end())
    return SourceRange(offset, offset)


def _find_token_kind_and_path(text: str, start: int, line_start: int) -> tuple[Kind, KeyPath] | None:
    """Return the kind and path for a token starting here. A key's or header's path ends in MARK."""
    before = text[:start]
    for _ in range(MAX_BLANKED_LINES):
        closing = _list_missing_brackets(before)
        failures = []
        # First as a key, which needs a value; then as a value, or as a header's part.
        for mark in (f'"\\u0000mark" = {KEY_MARK_VALUE}', '"\\u0000mark"'):
            try:
                return _find_kind_and_path_of_mark(tomli.loads(f"{before}{mark}{closing}"))
            except tomli.TOMLDecodeError as error:
                failures.append(error.pos)
            except (ValueError, RecursionError):
                return None
        broken = before.rfind("\n", 0, max(failures)) + 1
        if broken >= line_start:
            return None
        # The line keeps its length, so that offsets stay valid.
        end = before.find("\n", broken)
        before = before[:broken] + " " * (end - broken) + before[end:]
    return None


def _list_missing_brackets(text: str) -> str:
    """Return the closing brackets missing in a text."""
    closers: list[str] = []
    for bracket in BRACKET.finditer(text):
        if bracket[0] in _CLOSING:
            closers.append(_CLOSING[bracket[0]])
        elif bracket[0] in "]}" and closers:
            closers.pop()
    return "".join(reversed(closers))


def _find_kind_and_path_of_mark(tree: Any) -> tuple[Kind, KeyPath] | None:
    """Return the mark's kind and path in a tree, or None."""
    stack: list[tuple[KeyPath, Any]] = [((), tree)]
    while stack:
        path, item = stack.pop()
        if item == MARK:
            return "value", path
        if path and path[-1] == MARK:
            return "key" if item == KEY_MARK_VALUE else "header", path
        if isinstance(item, dict):
            stack += [((*path, key), part) for key, part in item.items()]
        elif isinstance(item, list):
            stack += [((*path, number), part) for number, part in enumerate(item)]
    return None


def _unquote(token: str) -> str:
    """Return a token without quotes. Its closing quote may be missing."""
    if token[:1] not in ("'", '"'):
        return token
    inside = token[1:-1] if len(token) > 1 and token[-1] == token[0] else token[1:]
    if token[0] == "'" or "\\" not in inside:
        return inside
    try:
        return str(tomli.loads(f'x = "{inside}"')["x"])
    except tomli.TOMLDecodeError:
        return inside
