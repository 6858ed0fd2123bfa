"""Parsing: limits, and diagnostics with the position of the mistake."""

import time

import pytest
import tomli

from drawloom.graph.problems import Position, RecipeError
from drawloom.graph.toml.diagnosis import diagnose_syntax_error
from drawloom.graph.toml.parsing import MAX_DEPTH, MAX_DIGITS, MAX_FILE_BYTES, MAX_KEY_PARTS, decode, parse

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
def test_pathological_text_is_read_or_refused_within_two_seconds(text: str) -> None:
    """Deep, long or unterminated text is parsed or refused with a position in two seconds of CPU time."""
    began = time.process_time()
    try:
        parse(text[:MAX_FILE_BYTES])
    except RecipeError as error:
        (problem,) = error.problems
        assert problem.text and problem.position and problem.position.line >= 1 and problem.position.column >= 1
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("text", "line", "column", "reason"),
    [
        ("x = 1\na = " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), 2, 5 + MAX_DEPTH, "nested more than 32 deep"),
        ('s = "[[["\na = ' + "[" * 2000, 2, 5 + MAX_DEPTH, "nested more than 32 deep"),
        ("b = 1\na = " + "9" * (MAX_DIGITS * 2), 2, 5, "a number has more than 64 digits"),
        ("b = 1\na = " + "9" * 5000, 2, 5, "a number has more than 64 digits"),
        ("b = 1\n" + "a." * MAX_KEY_PARTS + "a = 1", 2, 1, "a key has more than 32 parts"),
    ],
)
def test_an_exceeded_limit_is_reported_where_it_is_exceeded(text: str, line: int, column: int, reason: str) -> None:
    """The problem has the position of the first bracket, digit or key beyond the limit."""
    with pytest.raises(RecipeError) as caught:
        parse(text, "a.toml")
    (problem,) = caught.value.problems
    assert problem.position == Position("a.toml", line, column) and reason in problem.text


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1),
        "a." * (MAX_KEY_PARTS - 2) + "a = 1",
        "a = " + "9" * MAX_DIGITS,
        '"' + "a." * 500 + '" = 1',
        'a = """\n' + "x." * 500 + "x = 1\n" + '"""',
        "a = '[" + "x." * 500 + "x]'",
        "# [" + "x." * 500 + "x]",
        "a = '" + "[" * 100 + "'",
        "a = '" + "9" * 100 + "'",
    ],
)
def test_text_within_the_limits_is_parsed_as_tomli_parses_it(text: str) -> None:
    """Dots, brackets and digits inside strings and comments do not count for the limits."""
    assert parse(text) == tomli.loads(text)


def test_a_byte_order_mark_is_left_out_of_the_text() -> None:
    """Bytes with and without a byte order mark give the same text, with unchanged line ends."""
    assert decode(b"\xef\xbb\xbfa = 1\r\n") == decode(b"a = 1\r\n") == "a = 1\r\n"


@pytest.mark.parametrize(
    ("content", "line", "column"), [(b"\xff\xfea\x00", 1, 1), (b"a = 1\nb = '\xc3'", 2, 6), (b"\xef\xbb\xbf\xff", 1, 1)]
)
def test_invalid_utf_8_is_reported_at_its_first_byte(content: bytes, line: int, column: int) -> None:
    """The message names line and column of the first invalid byte."""
    with pytest.raises(ValueError, match=f"line {line}, column {column} is not UTF-8"):
        decode(content)


INVALID = "this is not TOML: Invalid value"
UNFINISHED = "this is not TOML: Expected newline or end of document after a statement"
BELOW = "TOML writes key = value, below a [table]"
CYRILLIC = "'\\u0430' is CYRILLIC SMALL LETTER A; put quotes around text that contains it"


@pytest.mark.parametrize(
    ("text", "at", "reason", "hint"),
    [
        ("a = True", "True", "True is not a TOML value", "write true"),
        ("a = [1, None]", "None", "None is not a TOML value", "leave the key out: TOML has no such value"),
        ("a = 1\nb = 2\na = 3", "a = 3", "'a' is set twice", "it is set on line 1 already"),
        ("[n]\nq.r = 1\n[m]\n[n.q]", "[n.q]", "'q' is set twice", "it is set on line 2 already"),
        ("[a]\nb = 1\n[c]\n[a]  # again", "[a]  #", "'a' is set twice", "it is set on line 1 already"),
        ("[[a]]\nb = 0\n[[a]]\nb = 1\nb = 2", "b = 2", "'b' is set twice", "it is set on line 4 already"),
        ("a = ['x\n]", "'x", "unterminated string", "close it with the quotes that opened it"),
        ("b = 'ok'\na = \"x", '"x', "unterminated string", "close it with the quotes that opened it"),
        (
            'b = "ok"\na = """\nx = 1\n[y]\n',
            '"""',
            "unterminated string",
            "close it with the quotes that opened it",
        ),
        (
            '{"a": 1}',
            "{",
            "this is not TOML: Invalid statement",
            f"this looks like JSON; {BELOW}",
        ),
        ("\u0430 = 1", "\u0430", "this is not TOML: Invalid statement", CYRILLIC),
        ("[a]\nname = mine # c", "mine", INVALID, 'strings need quotes: write "mine"'),
        ("name = my run", "my run", INVALID, 'strings need quotes: write "my run"'),
        ("path = ../runs/x", "../runs", INVALID, 'strings need quotes: write "../runs/x"'),
        ("use = { a = b.c }", "b.c", INVALID, 'strings need quotes: write "b.c"'),
        ('paths = ["a", b/*.txt]', "b/", INVALID, 'strings need quotes: write "b/*.txt"'),
        ("name = 2024-run", "-run", UNFINISHED, 'strings need quotes: write "2024-run"'),
        ("lr = 0,001", ",001", UNFINISHED, "write 0.001: decimals have a point"),
        ("lr = 0.1.2", ".2", UNFINISHED, ""),
        ("a: 1", ": 1", "this is not TOML: Expected '=' after a key in a key/value pair", BELOW),
    ],
)
def test_a_syntax_error_is_reported_where_it_began(text: str, at: str, reason: str, hint: str) -> None:
    """A syntax error has the offset of the second key, the opening quotes or the invalid word."""
    with pytest.raises(tomli.TOMLDecodeError) as caught:
        tomli.loads(text)
    assert diagnose_syntax_error(text, caught.value) == (reason, text.rindex(at), hint)
