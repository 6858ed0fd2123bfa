"""TOML values and keys as text."""

import re
from datetime import UTC, datetime, time, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import example, given
from hypothesis import strategies as st

from drawloom.graph.toml import emit

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
OFFSETS = st.none() | st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
SCALARS = st.one_of(
    TEXTS,
    st.booleans(),
    st.integers(),
    st.floats(),
    st.datetimes(timezones=OFFSETS).map(lambda moment: moment.replace(fold=0)),  # TOML knows no fold
    st.dates(),
    st.times().map(lambda moment: moment.replace(fold=0)),
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=10)


@given(VALUES)
@example("".join(map(chr, range(256))) + "\u2028\ufeff\U0010ffff")
@example({"": {}, "a b": [], "é": -0.0})
def test_tomli_reads_a_written_value_back(value: Any) -> None:
    """tomli reads a written value back with its types, the sign of zero and the keys' order."""
    assert repr(tomli.loads(f"x = {emit.dump_toml(value)}")) == repr({"x": value})


@given(VALUES)
def test_a_value_is_one_printable_line(value: Any) -> None:
    """A written value has no control characters: TOML 1.0 forbids ASCII's, and U+009B controls a terminal."""
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", emit.dump_toml(value))


@given(TEXTS)
def test_tomli_reads_a_written_key_back(name: str) -> None:
    """Any text can be a key, even an empty text."""
    assert tomli.loads(f"{emit.dump_key(name)} = 0") == {name: 0}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\tb\\", r'"a\tb\\"'),
        ("\x1b", r'"\u001B"'),
        ("ä", '"ä"'),
        (True, "true"),
        (8.0, "8.0"),
        (float("-inf"), "-inf"),
        ([1, [2.5]], "[1, [2.5]]"),
        ((1, 2), "[1, 2]"),
        ({"a": 1, "b c": {}}, '{ a = 1, "b c" = {} }'),
        (datetime(1979, 5, 27, 7, 32, tzinfo=UTC), "1979-05-27T07:32:00+00:00"),
    ],
)
def test_values_look_as_a_person_would_write_them(value: Any, text: str) -> None:
    """Values have short escapes, spaces inside braces, and quotes only if needed."""
    assert emit.dump_toml(value) == text


@pytest.mark.parametrize("name", ["a", "A-b_9", "1"])
def test_a_plain_key_has_no_quotes(name: str) -> None:
    """A key of letters, digits, dashes and underscores is written without quotes."""
    assert emit.dump_key(name) == name


@pytest.mark.parametrize("value", [None, [None], {"a": {1}}, b"x", Path("x"), 1j])
def test_a_type_that_toml_lacks_is_a_type_error(value: Any) -> None:
    """A type that TOML lacks raises TypeError at any depth."""
    with pytest.raises(TypeError, match="TOML can't express"):
        emit.dump_toml(value)


@pytest.mark.parametrize(
    "value",
    [
        "\ud800",
        {"\udfff": 1},
        time(1, tzinfo=UTC),
        datetime(1, 1, 1, tzinfo=timezone(timedelta(seconds=90))),
    ],
)
def test_a_value_that_toml_cannot_express_is_a_value_error(value: Any) -> None:
    """A value that tomli would refuse or read differently raises ValueError."""
    with pytest.raises(ValueError, match="TOML can't express"):
        emit.dump_toml(value)


def test_the_deepest_value_that_tomli_reads_is_written() -> None:
    """A value of 400 levels is written without a RecursionError."""
    text = "[{ b = " * 200 + "1" + " }]" * 200
    assert emit.dump_toml(tomli.loads(f"x = {text}")["x"]) == text
