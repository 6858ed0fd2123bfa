"""Descriptions of types and values in TOML's terms."""

from collections.abc import Mapping, Sequence
from datetime import date, datetime, time
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Optional

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.graph.types import describe


class Side(Enum):
    LEFT = "left"
    RIGHT = 2


@attrs.frozen
class Window:
    size: int
    _sink: int = 0
    inner: "Window | None" = None
    derived: int = attrs.field(init=False, default=0)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (bool, "boolean"),
        (Path, "path"),
        (datetime, "date-time"),
        (date, "date"),
        (time, "time"),
        (Any, "value"),
        (int | None, "integer"),
        (Optional[int], "integer"),  # noqa: UP045, typing's own unions are another type
        (Path | str, "path or string"),
        (int | Literal["last", "never"] | None, 'integer, "last" or "never"'),
        (Literal["a", 1, True], '"a", 1 or true'),
        (Side, '"left" or 2'),
        (list[int], "array of integers"),
        (Sequence[Path], "array of paths"),
        (tuple[bool, ...], "array of booleans"),
        (list[list[float]], "array of arrays of numbers"),
        (list[int | Literal["x"]], 'array of integers or "x"'),
        (list[Any], "array"),
        (list, "array"),
        (tuple, "array"),
        (tuple[float, float], "array of 2 numbers"),
        (tuple[int], "array [integer]"),
        (tuple[int, list[str]], "array [integer, array of strings]"),
        (dict[str, int], "table of integers"),
        (Mapping[str, Window], "table of tables with size, sink, inner"),
        (dict[str, Any], "table"),
        (dict, "table"),
        (Window, "table with size, sink, inner"),
    ],
)
def test_types_are_named_in_terms_of_toml(kind: Any, text: str) -> None:
    """Choices are written as in TOML, item types in the plural, and None is left out."""
    assert describe.describe_type(kind) == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int | str | Literal["x"], 'expected an integer, a string or "x"'),
        (list[int] | None, "expected an array of integers"),
        (Literal["x"], 'expected "x"'),
    ],
)
def test_alternatives_have_articles(kind: Any, text: str) -> None:
    """Alternatives have articles, except choices, which are listed."""
    assert describe.format_expected_type(kind) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("x\n", r'the string "x\n"'),
        (3, "the integer 3"),
        (1e-5, "the number 1e-05"),
        (True, "true"),
        ([1, "a"], 'the array [1, "a"]'),
        ({"a": {}}, "the table { a = {} }"),
        (time(7, 32), "the time 07:32:00"),
        (None, "nothing"),
        ({1}, "{1}"),
        ([None], "the array [None]"),
    ],
)
def test_values_are_named_by_their_type_and_text(value: Any, text: str) -> None:
    """A value has a noun and its TOML text, or its Python text without a noun."""
    assert describe.describe(value) == text


@given(st.recursive(st.text() | st.binary() | st.floats(), st.lists))
def test_a_value_is_shown_in_one_short_printable_line(value: Any) -> None:
    """Values of any type and length give one line, so that a message stays on one line."""
    shown = describe.dump_shortened_toml(value)
    assert 0 < len(shown) <= describe.MAX_VALUE_LENGTH
    assert not {c for c in shown if c < " " or c == "\x7f" or "\ud800" <= c <= "\udfff"}
