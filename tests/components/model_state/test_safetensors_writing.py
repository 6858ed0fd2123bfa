"""Splitting tensors into files."""

import json
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from drawloom.components.model_state.leaves import identity
from drawloom.components.model_state.safetensors_writing import split, write_safetensors
from drawloom.components.model_state.tensor_source import InMemory, TensorKind


@given(sizes=st.lists(st.integers(0, 50), max_size=20), limit=st.integers(1, 60))
def test_split_keeps_order_and_limit(sizes: list[int], limit: int) -> None:
    """All names appear once in order; a file above the limit holds one tensor; no two neighbours would fit in one."""
    kinds = {f"t{number}": TensorKind((size,), torch.uint8) for number, size in enumerate(sizes)}
    shards = split(kinds, limit)
    totals = [sum(kinds[name].bytes for name in shard) for shard in shards]
    assert [name for shard in shards for name in shard] == list(kinds)
    assert all(total <= limit or len(shard) == 1 for total, shard in zip(totals, shards, strict=True))
    firsts = [kinds[shard[0]].bytes for shard in shards[1:]]
    assert all(total + first > limit for total, first in zip(totals, firsts, strict=False))


def test_one_file_has_no_index(tmp_path: Path) -> None:
    """What fits in one file is `model.safetensors`, marked as torch's."""
    tensors = {"b": torch.arange(6.0).view(2, 3).T, "a": torch.ones(2, dtype=torch.bfloat16)}
    write_safetensors(tmp_path, InMemory(tensors), identity("b", "a"), 100)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_several_files_have_an_index(tmp_path: Path) -> None:
    """Files are numbered from 1 of their count, the index places each tensor and counts all bytes."""
    tensors = {name: torch.full((4,), float(number)) for number, name in enumerate("abc")}
    write_safetensors(tmp_path, InMemory(tensors), identity("a", "b", "c"), 32)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {"metadata": {"total_size": 48}, "weight_map": {"a": first, "b": first, "c": second}}
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [first, second]
    assert torch.equal(load_file(tmp_path / second)["c"], tensors["c"])
