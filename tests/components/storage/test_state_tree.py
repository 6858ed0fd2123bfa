"""State through files and back."""

import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import load
from torch import Tensor

from drawloom.components.ports.slices import SlicedTensor, TensorSlice
from drawloom.components.storage.safetensors.writer import write_safetensors_file
from drawloom.components.storage.state_tree import pack_state, unpack_state

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
TENSORS = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 9),
)
KEYS = st.text('ab/~.0"é', max_size=4)
STATES = st.recursive(
    SCALARS | TENSORS,
    lambda part: (
        st.lists(part, max_size=3) | st.lists(part, max_size=3).map(tuple) | st.dictionaries(KEYS, part, max_size=3)
    ),
    max_leaves=10,
)


def _through_files(state: Any) -> Any:
    """Return the state as another process would read it: only bytes pass."""
    tree, tensors = pack_state(state)
    return unpack_state(json.loads(json.dumps(tree, allow_nan=False)), load(_file_of(tensors)))


def _file_of(tensors: Mapping[str, Tensor]) -> bytes:
    with TemporaryDirectory() as folder:
        write_safetensors_file(Path(folder, "file"), tensors)
        return Path(folder, "file").read_bytes()


def _same(one: Any, other: Any) -> bool:
    """Equal in type, order and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return (one.dtype, one.shape, one.tolist()) == (other.dtype, other.shape, other.tolist())
    if isinstance(one, dict):
        return list(one) == list(other) and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, float):
        return math.isnan(one) == math.isnan(other) and (math.isnan(one) or one.hex() == other.hex())
    return bool(one == other)


@hypothesis.given(st.dictionaries(KEYS, STATES, max_size=4))
def test_everything_comes_back_as_it_was(state: dict[str, Any]) -> None:
    """Types, order of keys, signs of zero, infinities and NaN, huge integers, odd keys and every tensor survive."""
    assert _same(_through_files(state), state)


@pytest.mark.parametrize("look_alike", [{"dict": {}}, {"tensor": "a"}, {"float": "nan"}, {"dict": {"tensor": "x"}}])
def test_a_dict_that_looks_like_a_tree_node_is_a_dict(look_alike: dict[str, Any]) -> None:
    """A dict with a key such as "tensor" is restored as a dict."""
    state = {"a": torch.ones(1), "b": look_alike}
    assert _same(_through_files(state), state)


def test_views_are_saved_with_their_own_values() -> None:
    """Transposed, strided, expanded and overlapping views come back with their own values, and small ones small."""
    table = torch.arange(1000.0).reshape(10, 100)
    views = {
        "transposed": table.T,
        "column": table[:, 3],
        "row": table[2],
        "twice": table[2],
        "reversed": table.flip(0)[1::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "whole": table,
        "tied": table,
        "parameter": torch.nn.Parameter(table[1, :2]),
        "scalar": table[1, 1],
    }
    loaded = _through_files(views)
    assert all(torch.equal(loaded[name], view) for name, view in views.items())
    assert len(_file_of({"view": table[:1, :1]})) < 200
    assert loaded["row"].data_ptr() == loaded["twice"].data_ptr()  # what is one tensor is saved once
    assert len(pack_state(views)[1]) == len(views) - 2


def test_names_tell_paths_apart() -> None:
    """A key with a slash is not a nested key."""
    _, tensors = pack_state({"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}, "a~1b": torch.ones(2)})
    assert sorted(tensors) == ["/0", "/2", "a/b"]
    assert tensors["a/b"].item() == 1


def test_an_ordered_dict_is_a_dict() -> None:
    """An ordered dict from torch's modules is accepted."""
    assert _through_files(torch.nn.Linear(1, 1).state_dict()).keys() == {"weight", "bias"}
    assert type(_through_files({"a": OrderedDict(b=1)})["a"]) is dict


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": {1, 2}}}, "a/b is a set"),
        ({1, 2}, "it is a set"),
        ({"a": [0, np.float64(1)]}, "a/1 is a float64"),
        ({"a": np.zeros(1)}, "a is a ndarray"),
        ({"a": b"bytes"}, "a is a bytes"),
        ({"a": {1: 2}}, "a has the key 1"),
    ],
)
def test_a_value_that_would_not_round_trip_is_refused_with_its_path(state: dict[str, Any], words: str) -> None:
    """Sets, arrays, bytes and number keys are errors, not silently lists and strings."""
    with pytest.raises(TypeError, match=words):
        pack_state(state)


def test_both_missing_and_unexpected_tensors_are_listed() -> None:
    """Tree and tensors of two different states don't make a third."""
    tree, _ = pack_state({"a": torch.zeros(1), "b": torch.zeros(1), "c": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"missing a, b; unexpected x$"):
        unpack_state(tree, {"c": torch.zeros(1), "x": torch.zeros(1)})


def test_parts_of_tensors_become_slices_of_the_whole() -> None:
    """A part of a whole tensor is a slice, a part of a slice is a slice of the whole; everything else is unchanged."""
    whole, outer = torch.arange(12.0).view(6, 2), TensorSlice((6, 2), (2, 0), (4, 2))
    state = {"a": [whole, 1], "b": SlicedTensor(whole[2:], outer), "c": (torch.ones(2), float("nan"), None)}
    tree, tensors = pack_state(state)
    parts = {"a/0": TensorSlice((6, 2), (4, 0), (1, 2)), "b": TensorSlice((4, 2), (1, 0), (2, 2))}
    cut = {name: SlicedTensor(tensors[name][part.index()], part) for name, part in parts.items()}
    narrowed = unpack_state(tree, {**tensors, **cut})
    assert narrowed["a"][0].tensor_slice == parts["a/0"] and narrowed["b"].tensor_slice == TensorSlice(
        (6, 2), (3, 0), (2, 2)
    )
    assert all(
        torch.equal(piece.tensor, whole[piece.tensor_slice.index()]) for piece in (narrowed["a"][0], narrowed["b"])
    )
    assert narrowed["a"][1] == 1 and narrowed["c"][0].tolist() == [1, 1] and str(narrowed["c"][1:]) == "(nan, None)"
