"""Bytes that are no recipe are refused at once."""

import time

import pytest
import tomli

from drawloom.graph.toml.parsing import DEPTH, DIGITS, LARGEST, PARTS, Unreadable, decode, parse

WIDE = [
    ".".join(["a"] * 900) + " = 1",
    "\n".join(".".join([f"k{number}"] + ["a"] * 900) + " = 1" for number in range(500)),
    "\n".join("[" + ".".join([f"k{number}"] + ['"a"'] * 900) + "]" for number in range(300)),
    "a = {" + ",".join(".".join([f"k{number}"] + ["'a'"] * 100) + "=1" for number in range(2000)) + "}",
    "a = " + "[" * 5000,
    "a = " + "[" * 900 + "]" * 900,
    "a = " + "{a=" * 900 + "1" + "}" * 900,
    "a = " + "9" * 100_000,
    "a = 0x" + "f" * 1_000_000,
    'a = "' + "\\n" * 500_000 + '"',
    'a = """' + "\n" * 1_000_000 + '"""',
    "a = [" + "1," * 500_000 + "]",
    "[[a]]\n" * 150_000,
    "#" * 1_000_000,
    "[" * 1_000_000,
    "a" * 1_000_000,
    "a." * 500_000,
    '"' * 1_000_000,
    "'''" * 300_000,
    " = \n" * 200_000,
]


@pytest.mark.parametrize("text", WIDE, ids=lambda text: f"{len(text)} of {text[:12]!r}")
def test_nothing_takes_long(text: str) -> None:
    """What is deep, long or endless is read or refused within two seconds, with a place."""
    began = time.process_time()
    try:
        parse(text[:LARGEST])
    except Unreadable as error:
        assert error.text and error.line >= 1 and error.column >= 1
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("text", "line", "column", "reason"),
    [
        ("x = 1\na = " + "[" * (DEPTH + 1) + "]" * (DEPTH + 1), 2, 5 + DEPTH, "nested more than 32 deep"),
        ('s = "[[["\na = ' + "[" * 2000, 2, 5 + DEPTH, "nested more than 32 deep"),
        ("b = 1\na = " + "9" * (DIGITS * 2), 2, 5, "a number of more than 64 digits"),
        ("b = 1\na = " + "9" * 5000, 2, 5, "a number of more than 64 digits"),
        ("b = 1\n" + "a." * PARTS + "a = 1", 2, 1, "a key of more than 32 parts"),
    ],
)
def test_the_place_is_where_it_goes_too_far(text: str, line: int, column: int, reason: str) -> None:
    """A bound that is broken is told where it is broken."""
    with pytest.raises(Unreadable) as caught:
        parse(text)
    assert (caught.value.line, caught.value.column) == (line, column) and reason in caught.value.text


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * (DEPTH - 1) + "]" * (DEPTH - 1),
        "a." * (PARTS - 2) + "a = 1",
        "a = " + "9" * DIGITS,
        '"' + "a." * 500 + '" = 1',
        'a = """\n' + "x." * 500 + "x = 1\n" + '"""',
        "a = '[" + "x." * 500 + "x]'",
        "# [" + "x." * 500 + "x]",
        "a = '" + "[" * 100 + "'",
        "a = '" + "9" * 100 + "'",
    ],
)
def test_what_is_within_the_bounds_is_read_as_tomli_reads_it(text: str) -> None:
    """The bounds refuse nothing else: dots inside of strings are no parts of keys."""
    assert parse(text) == tomli.loads(text)


def test_bytes_are_text_with_or_without_a_mark() -> None:
    """A mark of byte order is left out, line ends stay as they are."""
    assert decode(b"\xef\xbb\xbfa = 1\r\n") == decode(b"a = 1\r\n") == "a = 1\r\n"


@pytest.mark.parametrize(
    ("content", "line", "column"), [(b"\xff\xfea\x00", 1, 1), (b"a = 1\nb = '\xc3'", 2, 6), (b"\xef\xbb\xbf\xff", 1, 1)]
)
def test_what_is_not_utf_8_has_a_place(content: bytes, line: int, column: int) -> None:
    """The first byte that is no text is told by line and column."""
    with pytest.raises(Unreadable, match="not UTF-8") as caught:
        decode(content)
    assert (caught.value.line, caught.value.column) == (line, column)
