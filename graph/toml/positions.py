"""Line and column of every key and value of a TOML text: an index of our own, since tomli reports no positions."""

import re
from bisect import bisect_right
from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import tomli

from drawloom.graph.problems import KeyPath


class SourceRange(NamedTuple):
    """The half-open range [start, end) of a text, in code points from 0."""

    start: int
    end: int


class SourceMap:
    """
    The positions in a text that tomli (2.4 or newer: TOML 1.1) has accepted; the text is indexed at the first lookup.

    Offsets count code points of the text as it was given: a CRLF is two.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    def key(self, path: KeyPath) -> SourceRange | None:
        """The last key of a path: in its `[header]`, or where it first appears. None for an index, which has no key."""
        entry, known = self._find(path)
        return SourceRange._make(entry[0]) if entry[0] and known == len(path) else None

    def value(self, path: KeyPath) -> SourceRange | None:
        """The value at a path: for a table its `[header]` or, without a header, the key that implies it."""
        entry, known = self._find(path)
        return SourceRange._make(entry[1]) if known == len(path) else None

    def nearest(self, path: KeyPath) -> SourceRange:
        """The value at the longest prefix of a path that is in the text; for none, the whole text."""
        return SourceRange._make(self._find(path)[0][1])

    def position(self, offset: int) -> tuple[int, int]:
        """Line and column of an offset, both from 1; the column counts code points."""
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def _find(self, path: KeyPath) -> tuple["_Entry", int]:
        """The entry at the longest prefix of a path that is in the text, and the length of that prefix."""
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
        return [0, *(found.end() for found in re.finditer("\n", self._text))]


# An entry: the range of its key, the range of its value, and its items. A plain tuple, since a recipe has thousands.
# Items of arrays have integer keys, so an entry with an item 0 is an array.
_Entry = tuple[tuple[int, int] | None, tuple[int, int], "_Inside"]
_Inside = dict[str | int, _Entry]
# The destination of an entry whose value is still to be read: the table, the name in it, and the range of the key.
_Slot = tuple[_Inside, str | int, tuple[int, int] | None]


# tomli has accepted the text, so these patterns only distinguish what may follow, and validate nothing.
def _always(pattern: str) -> Callable[[str, int], re.Match[str]]:
    """A pattern that is known to match at every offset where it is used."""
    return re.compile(pattern).match  # type: ignore[return-value]


_STRING = r"""(?:"(?:[^"\\]|\\.)*+"|'[^']*+')"""
_blank = _always(r"(?:[ \t\r\n]++|#[^\n]*+)*+")
_key = _always(rf"[ \t]*+([A-Za-z0-9_-]++|{_STRING})[ \t]*+")
_scalar = _always(
    r'"""(?:[^"\\]|\\[\s\S]|"{1,2}(?!"))*+"{3,5}'  # the first two of five quotes belong to the string
    r"|'''[\s\S]*?'{3,5}"
    rf"|{_STRING}"
    r"|\d{4}-\d\d-\d\d [\d:.Zz+-]++"  # a space between date and time
    r"|[^\s,\]}#]++"
)


def _read_document(text: str) -> _Inside:
    top: _Inside = {}
    table, at = top, _blank(text, 0).end()
    while at < len(text):
        if text[at] == "[":
            table, at = _read_header(text, at, top)
        else:
            slot, at = _read_key(text, at, table)
            at = _read_value(text, at, slot)
        at = _blank(text, at).end()
    return top


def _read_header(text: str, start: int, top: _Inside) -> tuple[_Inside, int]:
    """Read `[key]` or `[[key]]`; returns the items of its table, and the offset behind the header."""
    width = 2 if text.startswith("[[", start) else 1
    (table, name, key), at = _read_key(text, start + width, top)
    end = at + width
    inside = table[name][2] if name in table else {}
    # Each [[key]] appends to the array; its range is that of the first header.
    if width == 1 or not inside:
        table[name] = key, (start, end), inside
    if width == 2:
        table, name, inside = inside, len(inside), {}
        table[name] = None, (start, end), inside
    return inside, end


def _read_key(text: str, at: int, table: _Inside) -> tuple[_Slot, int]:
    """Read a dotted key up to `=` or `]`; returns its slot below `table`, and the offset behind it."""
    while True:
        found = _key(text, at)
        name, place, at = _name(found[1]), found.span(1), found.end()
        if text[at] != ".":
            return (table, name, place), at
        if name not in table:
            table[name] = place, place, {}
        table = table[name][2]
        if 0 in table:  # an array of tables: a key continues the last of them
            table = table[len(table) - 1][2]
        at += 1


def _name(key: str) -> str:
    if key[0] not in "\"'":
        return key
    return tomli.loads("key = " + key)["key"] if "\\" in key else key[1:-1]


def _read_value(text: str, at: int, slot: _Slot | None) -> int:
    """Read the value after `=` with everything inside it; returns the offset behind it."""
    opened: list[tuple[_Slot, int, _Inside]] = []
    at = _blank(text, at + 1).end()
    while slot:
        if text[at] in "[{":
            opened.append((slot, at, {}))
            at += 1
        else:
            table, name, key = slot
            start, at = at, _scalar(text, at).end()
            table[name] = key, (start, at), {}
        slot, at = _next_slot(text, at, opened)
    return at


def _next_slot(text: str, at: int, opened: list[tuple[_Slot, int, _Inside]]) -> tuple[_Slot | None, int]:
    """Close the arrays and tables that end here; returns the slot and offset of the next value inside an open one."""
    while opened:
        at = _blank(text, at).end()
        if text[at] == ",":
            at = _blank(text, at + 1).end()
        (table, name, key), start, inside = opened[-1]
        if text[at] in "]}":
            at += 1
            table[name] = key, (start, at), inside
            opened.pop()
        elif text[start] == "[":
            return (inside, len(inside), None), at
        else:
            slot, at = _read_key(text, at, inside)
            return slot, _blank(text, at + 1).end()
    return None, at
