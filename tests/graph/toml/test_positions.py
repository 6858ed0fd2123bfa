"""Positions of keys and values in TOML text."""

import gc
import re
import time
from datetime import UTC
from itertools import pairwise
from typing import Any, TypeVar

import pytest
import tomli
from hypothesis import given, settings
from hypothesis import strategies as st

from drawloom.graph.problems import KeyPath
from drawloom.graph.toml.positions import SourceMap, SourceRange

T = TypeVar("T")

# Random documents: a random tree of values is written with a random choice of syntax at every step, so that the text is
# valid by construction and as odd as TOML allows.

ODD_KEYS = ["a", "b", "c", "0", "-_", "1e5", "true", "ä", "a.b", "", " ", '"', "'", "[x]", "#", "=", "\\", "😀"]
ODD_STRINGS = [
    'x"""\n[a]\nb = 1\n',
    "'''",
    '"',
    '"""""""',
    "\\",
    "[[a]]\n",
    "\n",
    "#",
    "}",
    "a\nb",
    "\x1b\x00",
    '""',
    '"" ""x',
]
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
KEYS = st.sampled_from(ODD_KEYS) | TEXTS
DATES = st.datetimes(timezones=st.none() | st.just(UTC)) | st.dates() | st.times()
SCALARS = st.integers() | st.floats() | st.booleans() | TEXTS | st.sampled_from(ODD_STRINGS) | DATES
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=5
)
TREES = st.recursive(
    st.dictionaries(KEYS, VALUES, max_size=3),
    lambda inner: st.dictionaries(KEYS, VALUES | inner | st.lists(inner, min_size=1, max_size=3), max_size=4),
    max_leaves=5,
)


class Writer:
    """Writer of a tree as TOML text with randomly chosen syntax."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def pick(self, *choices: T) -> T:
        return self.draw(st.sampled_from(choices))

    def space(self) -> str:
        return self.pick("", " ", "\t ")

    def gap(self) -> str:
        return self.pick("", " ", "\n", " # [x] = { \" '\n", "\n\n\t")

    def key(self, key: str) -> str:
        forms = [self.basic(key)]
        if re.fullmatch("[A-Za-z0-9_-]+", key):
            forms.append(key)
        if re.fullmatch(r"[^\x00-\x08\x0a-\x1f\x7f']*", key):
            forms.append(f"'{key}'")
        return self.pick(*forms)

    def write_dotted_key(self, keys: KeyPath) -> str:
        return (self.space() + "." + self.space()).join(self.key(str(key)) for key in keys)

    def value(self, value: Any) -> str:
        match value:
            case bool():
                return "true" if value else "false"
            case int():
                return self.pick(str(value), f"+{value}" if value >= 0 else str(value), hexadecimal(value))
            case float():
                return repr(value)
            case str():
                return self.string(value)
            case list():
                return f"[{self.gap()}{self.items([self.value(item) for item in value])}]"
            case dict():
                return f"{{{self.gap()}{self.items(self.pairs((), value))}}}"
            case _:
                return str(value.isoformat()).replace("T", self.pick("T", " ", "t"))

    def string(self, text: str) -> str:
        forms = [self.basic(text), self.multi_line(text)]
        if re.fullmatch(r"[^\x00-\x08\x0a-\x1f\x7f']*", text):
            forms.append(f"'{text}'")
        if re.fullmatch(r"(?:(?!''')[^\x00-\x08\x0b-\x1f\x7f])*", text):
            forms.append(f"'''\n{text}'''")
        return self.pick(*forms)

    def basic(self, text: str) -> str:
        return '"' + "".join(map(self.escape, text)) + '"'

    def multi_line(self, text: str) -> str:
        """Write a multi-line string with unescaped line ends, folds, and up to two unescaped quotes in a row."""
        body, quotes = "" if text[:1] != "\n" and self.pick(True, False) else "\n", 0
        for c in text:
            quotes = quotes + 1 if c == '"' and quotes < 2 and self.pick(True, False) else 0
            if c not in " \t\n" and not quotes:
                body += self.pick("", "", "", "\\\n", "\\ \n\n\t")
            body += c if quotes or c in "\t\n" else self.escape(c)
        return f'"""{body}"""'

    def escape(self, c: str) -> str:
        short = {"\b": "b", "\t": "t", "\n": "n", "\f": "f", "\r": "r", "\x1b": "e", '"': '"', "\\": "\\"}
        if c in short:
            return "\\" + short[c]
        if c < " " or c == "\x7f":
            return self.pick(f"\\x{ord(c):02x}", f"\\u{ord(c):04X}")
        return self.pick(c, c, c, f"\\U{ord(c):08x}")

    def items(self, written: list[str]) -> str:
        text = f"{self.gap()},{self.gap()}".join(written)
        return text + self.gap() + (self.pick("", ",") + self.gap() if written else "")

    def pairs(self, prefix: KeyPath, table: dict[str, Any]) -> list[str]:
        """Return the `key = value` pairs of a table in any order, some inner tables as dotted keys."""
        pairs = []
        for name, value in table.items():
            if isinstance(value, dict) and value and self.pick(True, False):
                pairs += self.pairs((*prefix, name), value)
            else:
                pairs.append(
                    f"{self.write_dotted_key((*prefix, name))}{self.space()}={self.space()}{self.value(value)}"
                )
        return self.draw(st.permutations(pairs))

    def document(self, tree: dict[str, Any]) -> str:
        pairs, below = self.section((), tree)
        text = "".join(pairs + below)
        return text.replace("\n", "\r\n") if self.pick(True, False, False) else text

    def section(self, path: KeyPath, table: dict[str, Any]) -> tuple[list[str], list[str]]:
        """Return the lines below a header: its pairs, and the sections of inner tables."""
        with_header = [name for name, value in table.items() if has_headers(value) and self.pick(True, True, False)]
        pairs = self.pairs((), {name: value for name, value in table.items() if name not in with_header})
        below = [line for name in with_header for line in self.sections((*path, name), table[name])]
        return [self.line(pair) for pair in pairs], below

    def sections(self, path: KeyPath, value: Any) -> list[str]:
        if isinstance(value, list):
            parts = [(self.header(path, "[[", "]]"), *self.section(path, table)) for table in value]
            return [line for header, pairs, below in parts for line in [header, *pairs, *below]]
        pairs, below = self.section(path, value)
        if below and not pairs and self.pick(True, False):
            return below  # the table is only implied
        own = [self.header(path, "[", "]"), *pairs]
        return self.pick(own + below, below + own)

    def header(self, path: KeyPath, left: str, right: str) -> str:
        return self.line(left + self.space() + self.write_dotted_key(path) + self.space() + right)

    def line(self, text: str) -> str:
        return self.space() + text + self.space() + self.pick("\n", "# a = 1\n", "\n\n", "\n  # [x]\n")


def hexadecimal(value: int) -> str:
    return f"0x{value:_x}" if value >= 0 else str(value)


def has_headers(value: Any) -> bool:
    tables = value if isinstance(value, list) else [value]
    return tables != [] and all(isinstance(table, dict) for table in tables)


@st.composite
def documents(draw: st.DrawFn) -> str:
    return Writer(draw).document(draw(TREES))


def list_paths(value: Any, path: KeyPath = ()) -> list[tuple[KeyPath, Any]]:
    """List all paths of a document with their values."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [(path, value)] + [pair for name, item in inside for pair in list_paths(item, (*path, name))]


def is_written_as(text: str, value: Any) -> bool:
    """Return whether a text is exactly this value, with its type and sign of zero."""
    try:
        return repr(tomli.loads(f"x = [{text}]")) == repr({"x": [value]}) and text == text.strip()
    except tomli.TOMLDecodeError:
        return False


def parse_header(header: str) -> KeyPath:
    """Return the keys of a header."""
    keys: KeyPath = ()
    inside: Any = tomli.loads(header)
    while inside not in ({}, [{}]):
        [(name, inside)] = inside.items()
        keys = (*keys, name)
    return keys


def cut(text: str, span: SourceRange | None) -> str:
    assert span is not None
    return text[span.start : span.end]


@given(documents())
def test_the_text_of_each_value_range_parses_to_the_value(text: str) -> None:
    """A value's range is its text, or the header or implying key of a table without braces."""
    source_map = SourceMap(text)
    for path, value in list_paths(tomli.loads(text))[1:]:
        piece = cut(text, source_map.value_range(path))
        names = tuple(step for step in path if isinstance(step, str))
        if not is_written_as(piece, value):
            assert isinstance(value, (dict, list))
            if piece[0] == "[":
                assert parse_header(piece) == names
            else:
                assert source_map.value_range(path) == source_map.key_range(path)


@given(documents())
def test_the_text_of_each_key_range_parses_to_the_key(text: str) -> None:
    """A key's range is its text before `=` and the value, and array items have no key."""
    source_map = SourceMap(text)
    for path, value in list_paths(tomli.loads(text))[1:]:
        key, end = source_map.key_range(path), source_map.value_range(path)
        assert end is not None
        if isinstance(path[-1], int):
            assert key is None
            continue
        assert tomli.loads(cut(text, key) + " = 0") == {path[-1]: 0}
        if not isinstance(value, (dict, list)):
            assert key is not None
            assert text[key.end : end.start].strip(" \t") == "="


@given(documents())
def test_value_ranges_do_not_overlap_and_items_are_in_order(text: str) -> None:
    """Scalar ranges never overlap, and an array item's content starts before the next item."""
    source_map, pairs = SourceMap(text), list_paths(tomli.loads(text))[1:]
    starts = {path: span.start for path, _ in pairs if (span := source_map.value_range(path))}
    scalars = sorted(
        source_map.value_range(path) or SourceRange(0, 0)
        for path, value in pairs
        if not isinstance(value, (dict, list))
    )
    assert all(before.end <= after.start for before, after in pairwise(scalars))
    for path in starts:
        for depth, step in enumerate(path):
            if isinstance(step, int):
                item, following = path[: depth + 1], (*path[:depth], step + 1)
                assert starts[item] <= starts[path] < starts.get(following, len(text))


@settings(max_examples=30)
@given(documents(), st.data())
def test_nearest_is_the_value_of_the_longest_known_part(text: str, data: st.DataObject) -> None:
    """`nearest` drops unknown steps from the end of a path until a value is known."""
    source_map = SourceMap(text)
    path, value = data.draw(st.sampled_from(list_paths(tomli.loads(text))))
    stray = ("nowhere", 0) if not isinstance(value, list) else (len(value), "x")
    assert source_map.value_range(path) == source_map.nearest_range(path) == source_map.nearest_range((*path, *stray))
    assert source_map.value_range((*path, *stray)) is source_map.key_range((*path, *stray)) is None


@given(st.text(st.sampled_from("a\n\r\u2028ä😀")), st.data())
def test_positions_count_lines_by_newline_and_columns_by_code_point(text: str, data: st.DataObject) -> None:
    """Only a newline ends a line, and the end of the text has a position."""
    offset = data.draw(st.integers(0, len(text)))
    before = text[:offset].split("\n")
    assert SourceMap(text).line_and_column(offset) == (len(before), len(before[-1]) + 1)


AWKWARD = """\
# [a]
title = "é😀"
of = 1
  [ "tab\\u006ce" . 'b c' ]   # header
x.y . z = { k = [1, 2.0,
   { m = QQQ
[not.a.header]
q = 1QQQ, }, # }
 ], "k.2" = '''
[[nor this]]''''', }
x.w = 1979-05-27 07:32:00Z
[[list.of]]
name = 'one'
[list.of.sub]
deep = true
[[list.of]]
name = "two"
[[list.of.inner]]
v = -inf
[list]
own = [ [ ], [0xA_B] ]
""".replace("QQQ", '"""')

EXPECTED = {
    ("title",): ((2, 1), (2, 9), '"é😀"'),
    ("of",): ((3, 1), (3, 6), "1"),
    ("table",): ((4, 5), (4, 5), '"tab\\u006ce"'),
    ("table", "b c"): ((4, 20), (4, 3), "[ \"tab\\u006ce\" . 'b c' ]"),
    ("table", "b c", "x"): ((5, 1), (5, 1), "x"),
    ("table", "b c", "x", "y"): ((5, 3), (5, 3), "y"),
    ("table", "b c", "x", "y", "z", "k", 0): (None, (5, 18), "1"),
    ("table", "b c", "x", "y", "z", "k", 1): (None, (5, 21), "2.0"),
    ("table", "b c", "x", "y", "z", "k", 2): (None, (6, 4), '{ m = """\n[not.a.header]\nq = 1""", }'),
    ("table", "b c", "x", "y", "z", "k", 2, "m"): ((6, 6), (6, 10), '"""\n[not.a.header]\nq = 1"""'),
    ("table", "b c", "x", "y", "z", "k.2"): ((9, 5), (9, 13), "'''\n[[nor this]]'''''"),
    ("table", "b c", "x", "w"): ((11, 3), (11, 7), "1979-05-27 07:32:00Z"),
    ("list", "of"): ((12, 8), (12, 1), "[[list.of]]"),
    ("list", "of", 0): (None, (12, 1), "[[list.of]]"),
    ("list", "of", 0, "name"): ((13, 1), (13, 8), "'one'"),
    ("list", "of", 0, "sub"): ((14, 10), (14, 1), "[list.of.sub]"),
    ("list", "of", 0, "sub", "deep"): ((15, 1), (15, 8), "true"),
    ("list", "of", 1): (None, (16, 1), "[[list.of]]"),
    ("list", "of", 1, "name"): ((17, 1), (17, 8), '"two"'),
    ("list", "of", 1, "inner", 0, "v"): ((19, 1), (19, 5), "-inf"),
    ("list",): ((20, 2), (20, 1), "[list]"),
    ("list", "own", 0): (None, (21, 9), "[ ]"),
    ("list", "own", 1, 0): (None, (21, 15), "0xA_B"),
}


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("path", EXPECTED, ids=str)
def test_awkward_documents_have_their_exact_lines_and_columns(path: KeyPath, ends: str) -> None:
    """Comments, wide characters, strings that look like headers and CRLF move no line and no column."""
    text = AWKWARD.replace("\n", ends)
    tomli.loads(text)
    source_map = SourceMap(text)
    key, value = source_map.key_range(path), source_map.value_range(path)
    assert value is not None
    ranges = (
        key and source_map.line_and_column(key.start),
        source_map.line_and_column(value.start),
        cut(text, value).replace(ends, "\n"),
    )
    assert ranges == EXPECTED[path]


ODD_VALUES = [
    '"""a""b"c"""',
    '"""\\"\\"\\""""',
    '"""two more"""""',
    '"""fold \\\n   # no comment"""',
    '"""fold \\\r\n\r\n   ]"""',
    '""""""',
    "''''''",
    "'''\\'''",
    "'''a''b'''''",
    '"\\"#]}\\\\"',
    "'\\'",
    '""',
    "1979-05-27 07:32",
    "1979-05-27T07:32:00.5-07:00",
    "1979-05-27",
    "07:32",
    "+1_000.5e-1_0",
    "nan",
    "0b1",
]


@pytest.mark.parametrize("value", ODD_VALUES)
@pytest.mark.parametrize(
    "around", ["x={}#", "x= {} \n\n", "x=[{},{}]", "x=[9\n,{}#\n]", "x={{a.b={}}}", "x={{a={} ,}}"]
)
def test_a_value_range_ends_with_the_value(value: str, around: str) -> None:
    """A scalar's range has exactly its own text in all forms, whatever follows."""
    text = around.format(value, value)
    source_map = SourceMap(text)
    leaves = [path for path, leaf in list_paths(tomli.loads(text)) if not isinstance(leaf, (dict, list)) and leaf != 9]
    assert leaves
    assert {cut(text, source_map.value_range(path)) for path in leaves} == {value}


@pytest.mark.parametrize(
    "text", ["", "\n", "# only a comment", "[a]", "a=1", "a=[]", "a={}", "a.b='x' #", "[[a]]\n[[a]]"]
)
def test_the_last_line_needs_no_newline(text: str) -> None:
    """Complete texts without a final newline, or without any statement, have positions."""
    source_map = SourceMap(text)
    for path, _ in list_paths(tomli.loads(text)):
        assert cut(text, source_map.value_range(path)) in text
    assert source_map.nearest_range(("nowhere",)) == (0, len(text))


def test_the_text_is_indexed_at_the_first_lookup() -> None:
    """A text that is not TOML has line positions, because only lookups parse it."""
    assert SourceMap("a =\nb").line_and_column(4) == (2, 1)


def test_the_deepest_text_that_tomli_accepts_is_indexed() -> None:
    """A key of a thousand parts and values nested 400 deep need no recursion."""
    dotted = ".".join(["k"] * 1000)
    text = f"{dotted} = 1\n[{dotted.replace('k', 'h')}]\na = {'[{b=' * 200}2{'}]' * 200}\n"
    tomli.loads(text)
    source_map = SourceMap(text)
    assert cut(text, source_map.value_range(("k",) * 1000)) == "1"
    assert cut(text, source_map.value_range(("h",) * 1000 + ("a",) + (0, "b") * 200)) == "2"


def test_a_file_of_5000_lines_is_indexed_quickly() -> None:
    """5000 lines take about 10 ms of processor time, and the 200 ms bound finds quadratic work."""
    node = '[node_{0}]\nuse = "a.b"\nlr = 1e-5\ndim = {0}\npaths = ["a", "b"]\nof = "@n{0}"  # x\n\n'
    source_map = SourceMap("".join(node.format(i) for i in range(715)))
    gc.disable()  # a collection looks at all objects of other tests
    try:
        start = time.process_time()
        assert source_map.value_range(("node_714", "dim")) is not None
        assert time.process_time() - start < 0.2
    finally:
        gc.enable()
