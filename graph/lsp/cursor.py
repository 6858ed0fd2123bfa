"""
What a position in the text of a recipe is: a part of a header, a key or a value, at which path.

The text before the position is completed to TOML by a mark and the brackets that are open, and read: so it does not
matter what comes after it, and whether that is TOML.
"""

import re
from typing import Any, Literal

import attrs
import tomli

from drawloom.graph.problems import KeyPath
from drawloom.graph.toml.parsing import BRACKET, MARK

Kind = Literal["header", "key", "value"]

_QUOTED = r"\"(?:[^\"\\\n]|\\.)*+\"?|'[^'\n]*+'?"
KEY = re.compile(rf"{_QUOTED}|[A-Za-z0-9_-]++")
"""A part of a key, whose quotes may be open still."""

VALUE = re.compile(rf"{_QUOTED}|[^\s,\[\]{{}}=\"'#]++")
"""A value that is neither an array nor a table."""

MAX_BLANKED_LINES = 5
"""Lines above the position that are left out because they are not TOML; each try reads the text."""

_CLOSING = {"[": "]", "{": "}"}


@attrs.frozen
class Cursor:
    """
    The token at a position, in the range [start, end) of the text, which is empty where one may be typed.

    `path` leads to the key or value that it is; in a header, or in a dotted key, to the part that it is. `written` is
    the token without its quotes.
    """

    kind: Kind
    path: KeyPath
    start: int
    end: int
    written: str
    quoted: bool

    @classmethod
    def at(cls, text: str, offset: int) -> "Cursor | None":
        """The token at an offset of a text, or that ends there; None in comments, and where TOML allows no token."""
        line = text.rfind("\n", 0, offset) + 1
        for pattern in (KEY, VALUE):
            start, end = _find_token(pattern, text, line, offset)
            token = text[start:end]
            found = _classify(text, start, line)
            if found is not None and (found[0] == "value") == (pattern is VALUE):
                kind, path = found
                plain = _unquote(token)
                path = path if kind == "value" else (*path[:-1], plain)
                return cls(kind, path, start, end, plain, token.startswith(('"', "'")))
        return None


def _find_token(pattern: re.Pattern[str], text: str, line: int, offset: int) -> tuple[int, int]:
    """The range of the token around an offset; an empty one if there is none."""
    end = text.find("\n", line)
    for found in pattern.finditer(text, line, len(text) if end < 0 else end):
        if found.start() <= offset <= found.end():
            return found.span()
    return offset, offset


def _classify(text: str, start: int, line: int) -> tuple[Kind, KeyPath] | None:
    """What a token that starts here would be, and its path, which ends in MARK if it is a key."""
    before = text[:start]
    for _ in range(MAX_BLANKED_LINES):
        opened: list[str] = []
        for bracket in BRACKET.finditer(before):
            if bracket[0] in _CLOSING:
                opened.append(_CLOSING[bracket[0]])
            elif bracket[0] in "]}" and opened:
                opened.pop()
        closing = "".join(reversed(opened))
        failures = []
        for mark in ('"\\u0000mark" = 0', '"\\u0000mark"'):
            try:
                return _find_mark(tomli.loads(f"{before}{mark}{closing}"))
            except tomli.TOMLDecodeError as error:
                failures.append(error.pos)
            except (ValueError, RecursionError):
                return None
        broken = before.rfind("\n", 0, max(failures)) + 1
        if broken >= line:
            return None
        # Its length is kept, so that the position is the same.
        end = before.find("\n", broken)
        before = before[:broken] + " " * (end - broken) + before[end:]
    return None


def _find_mark(tree: Any) -> tuple[Kind, KeyPath] | None:
    """Where the mark is in a tree."""
    stack: list[tuple[KeyPath, Any]] = [((), tree)]
    while stack:
        path, item = stack.pop()
        if item == MARK:
            return "value", path
        if path and path[-1] == MARK:
            return "key" if item == 0 else "header", path
        if isinstance(item, dict):
            stack += [((*path, key), part) for key, part in item.items()]
        elif isinstance(item, list):
            stack += [((*path, number), part) for number, part in enumerate(item)]
    return None


def _unquote(token: str) -> str:
    """A token without quotes, of which the closing one may be missing."""
    if token[:1] not in ("'", '"'):
        return token
    inside = token[1:-1] if len(token) > 1 and token[-1] == token[0] else token[1:]
    if token[0] == "'" or "\\" not in inside:
        return inside
    try:
        return str(tomli.loads(f'x = "{inside}"')["x"])
    except tomli.TOMLDecodeError:
        return inside
