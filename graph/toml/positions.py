"""Line and column of every key and value in a TOML text. tomli reports no positions, so this module indexes them."""

import re
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import tomli

from drawloom.graph.problems import KeyPath

PART = r"""(?:[A-Za-z0-9_-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')"""
"""Pattern of one part of a dotted key."""


class SourceRange(NamedTuple):
    """Half-open range [start, end) of a text, in code points from 0."""

    start: int
    end: int


class SourceMap:
    """
    Positions in a text accepted by tomli (2.4 or newer: TOML 1.1). The first lookup indexes the text.

    Offsets count code points of the original text: a CRLF is two.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def key_range(self, path: KeyPath) -> SourceRange | None:
        """
        Return the range where a path's last key is written: in its `[header]`, or where it first appears. None for an
        array index.
        """
        entry, known = self._find_nearest_entry_and_depth(path)
        return SourceRange(entry[0][0], entry[0][1]) if entry[0] and known == len(path) else None

    def value_range(self, path: KeyPath) -> SourceRange | None:
        """Return the value's range at a path. For a table it is the `[header]`, or else the key implying the table."""
        entry, known = self._find_nearest_entry_and_depth(path)
        return SourceRange(entry[1][0], entry[1][1]) if known == len(path) else None

    def nearest_range(self, path: KeyPath) -> SourceRange:
        """Return the value's range at a path's longest prefix in the text. Default: the whole text."""
        start, end = self._find_nearest_entry_and_depth(path)[0][1]
        return SourceRange(start, end)

    def line_and_column(self, offset: int) -> tuple[int, int]:
        """Return line and column of an offset, both from 1. The column counts code points."""
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def _find_nearest_entry_and_depth(self, path: KeyPath) -> tuple["_Entry", int]:
        """Return the entry at a path's longest prefix in the text, and the prefix length."""
        entry = self._root
        for known, step in enumerate(path):
            if step not in entry[2]:
                return entry, known
            entry = entry[2][step]
        return entry, len(path)

    @cached_property
    def _root(self) -> "_Entry":
        return None, (0, len(self._text)), _read_document(self._text)

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(newline.end() for newline in re.finditer("\n", self._text))]


# An entry: the range of its key, the range of its value, and its items. A plain tuple, since a recipe has thousands.
# Items of arrays have integer keys, so an entry with an item 0 is an array.
_Entry = tuple[tuple[int, int] | None, tuple[int, int], "_Inside"]
_Inside = dict[str | int, _Entry]
# The destination of an entry whose value is not read yet: the table, the name in it, and the range of the key.
_Slot = tuple[_Inside, str | int, tuple[int, int] | None]


# tomli has accepted the text, so these patterns only distinguish tokens, and validate nothing.
def _compile_matcher(pattern: str) -> Callable[[str, int], re.Match[str]]:
    """Compile a pattern that matches at every offset where it is used."""
    return re.compile(pattern).match  # type: ignore[return-value]


_STRING = r"""(?:"(?:[^"\\]|\\.)*+"|'[^']*+')"""
_blank = _compile_matcher(r"(?:[ \t\r\n]++|#[^\n]*+)*+")
_key = _compile_matcher(rf"[ \t]*+([A-Za-z0-9_-]++|{_STRING})[ \t]*+")
_scalar = _compile_matcher(
    r'"""(?:[^"\\]|\\[\s\S]|"{1,2}(?!"))*+"{3,5}'  # the first two of five quotes belong to the string
    r"|'''[\s\S]*?'{3,5}"
    rf"|{_STRING}"
    r"|\d{4}-\d\d-\d\d [\d:.Zz+-]++"  # a space between date and time
    r"|[^\s,\]}#]++"
)


def _read_document(text: str) -> _Inside:
    top: _Inside = {}
    table, offset = top, _blank(text, 0).end()
    while offset < len(text):
        if text[offset] == "[":
            table, offset = _read_header(text, offset, top)
        else:
            slot, offset = _read_key(text, offset, table)
            offset = _read_value(text, offset, slot)
        offset = _blank(text, offset).end()
    return top


def _read_header(text: str, start: int, top: _Inside) -> tuple[_Inside, int]:
    """Read `[key]` or `[[key]]`. Return its table's items, and the offset behind the header."""
    width = 2 if text.startswith("[[", start) else 1
    (table, name, key), offset = _read_key(text, start + width, top)
    end = offset + width
    inside = table[name][2] if name in table else {}
    # Every [[key]] appends to the array, whose range is the first header.
    if width == 1 or not inside:
        table[name] = key, (start, end), inside
    if width == 2:
        table, name, inside = inside, len(inside), {}
        table[name] = None, (start, end), inside
    return inside, end


def _read_key(text: str, offset: int, table: _Inside) -> tuple[_Slot, int]:
    """Read a dotted key up to `=` or `]`. Return its slot below `table`, and the offset behind it."""
    while True:
        match = _key(text, offset)
        name, key_range, offset = _unquote_key(match[1]), match.span(1), match.end()
        if text[offset] != ".":
            return (table, name, key_range), offset
        if name not in table:
            table[name] = key_range, key_range, {}
        table = table[name][2]
        if 0 in table:  # an array of tables: a key continues the last table
            table = table[len(table) - 1][2]
        offset += 1


def _unquote_key(key: str) -> str:
    if key[0] not in "\"'":
        return key
    return tomli.loads("key = " + key)["key"] if "\\" in key else key[1:-1]


def _read_value(text: str, offset: int, slot: _Slot | None) -> int:
    """Read the value after `=` and everything inside it. Return the offset behind it."""
    containers: list[tuple[_Slot, int, _Inside]] = []
    offset = _blank(text, offset + 1).end()
    while slot:
        if text[offset] in "[{":
            containers.append((slot, offset, {}))
            offset += 1
        else:
            table, name, key = slot
            start, offset = offset, _scalar(text, offset).end()
            table[name] = key, (start, offset), {}
        slot, offset = _advance_to_next_value(text, offset, containers)
    return offset


def _advance_to_next_value(
    text: str, offset: int, containers: list[tuple[_Slot, int, _Inside]]
) -> tuple[_Slot | None, int]:
    """Close the arrays and tables ending here. Return slot and offset for the next value in an open container."""
    while containers:
        offset = _blank(text, offset).end()
        if text[offset] == ",":
            offset = _blank(text, offset + 1).end()
        (table, name, key), start, inside = containers[-1]
        if text[offset] in "]}":
            offset += 1
            table[name] = key, (start, offset), inside
            containers.pop()
        elif text[start] == "[":
            return (inside, len(inside), None), offset
        else:
            slot, offset = _read_key(text, offset, inside)
            return slot, _blank(text, offset + 1).end()
    return None, offset
