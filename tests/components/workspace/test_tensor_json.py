"""Configurations with tensors in them, apart and together again."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.workspace.tensor_json import MARK, Parcel, decode, encode, pack, unpack

KEYS = st.text().filter(lambda key: key != MARK)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
TENSORS = st.integers(0, 5).map(torch.arange)
CONFIGS = st.recursive(PLAIN | TENSORS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner))


def same(first: Any, second: Any) -> bool:
    """Equal, tensors by identity."""
    if isinstance(first, torch.Tensor):
        return first is second
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return type(first) is type(second) and bool(first == second)


@given(CONFIGS)
def test_apart_and_together(config: Any) -> None:
    """Any configuration comes back as it was, its tensors the same objects, its tree by way of JSON."""
    parcel = pack(config)
    assert same(unpack(Parcel(decode(encode(parcel.tree)), parcel.tensors)), config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"a": [{"b": {1, 2}}]}, r"config\.a\[0\]\.b is a set"),
        ({"a": {1: 2}}, r"config\.a has the key 1"),
        ({MARK: "0"}, "keys are strings, and not"),
        (object(), "config is a object"),
    ],
)
def test_what_json_can_not_say_is_refused(config: Any, message: str) -> None:
    """Something else than JSON is named with its place, and keys are never changed to strings behind one's back."""
    with pytest.raises(TypeError, match=message):
        pack(config)


def test_numbers_that_are_none_are_refused() -> None:
    """JSON has no word for what is not a number."""
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode({"a": float("nan")})


@pytest.mark.parametrize("tree", [{MARK: "1"}, [], {"a": {MARK: "0"}, "b": {MARK: "7"}}, {MARK: ["0"]}])
def test_a_tree_of_other_tensors_is_refused(tree: Any) -> None:
    """Tree and tensors must belong together."""
    with pytest.raises((ValueError, TypeError)):
        unpack(Parcel(tree, {"0": torch.ones(1)}))
