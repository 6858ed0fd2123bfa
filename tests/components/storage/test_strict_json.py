"""JSON from strangers."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.storage.strict_json import parse_strict_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(VALUES)
def test_valid_json_is_parsed_as_by_the_standard_library(value: Any) -> None:
    """Any valid JSON text is parsed as Python's json parses it."""
    text = json.dumps(value)
    assert parse_strict_json(text.encode(), max_values=10_000) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "b": 2, "a": 3}', "'a' more than once"),
        (b'{"a": {"b": 1, "\\u0062": 2}}', "'b' more than once"),
        (b'{"a": NaN}', "NaN is not a finite number"),
        (b"[-Infinity]", "-Infinity is not a finite number"),
        (b"[1.5, -1e999]", "-1e999 is not a finite number"),
        (b"[" * 900, "nested too deeply|Expecting value"),
        (b'"\xff"', "can't decode"),
        (b"", "Expecting value"),
        (b"1" * 5000, "4300"),
    ],
)
def test_ambiguous_and_invalid_json_is_refused(text: bytes, message: str) -> None:
    """Repeated names, numbers unknown to JSON, and other text raise the same kind of error."""
    with pytest.raises(ValueError, match=message):
        parse_strict_json(text, max_values=1000)


@pytest.mark.parametrize("text", [b"[" * 10**6, b'{"a":' * 10**6, b"[" + b"0," * 10**6, b'{"' + b'":0,"' * 10**6])
def test_json_with_too_many_parts_is_refused_before_parsing(text: bytes) -> None:
    """A text of too many parts costs no more than counting them."""
    began = time.perf_counter()
    with pytest.raises(ValueError, match="above the limit of 1000"):
        parse_strict_json(text, max_values=1000)
    assert time.perf_counter() - began < 0.5


def test_nesting_as_deep_as_parts_allow_is_refused() -> None:
    """Deep nesting is an error instead of a crash, even within the limit of parts."""
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_strict_json(b"[" * 500_000 + b"]" * 500_000, max_values=10**6)
