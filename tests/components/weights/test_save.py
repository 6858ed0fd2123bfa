"""Splitting tensors into files."""

import json
import os
import weakref
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.components.storage.tensor_source import TensorSpec
from drawloom.components.weights.mapper import identity, parallel, stack
from drawloom.components.weights.save import plan_files, split_by_size, write_files
from drawloom.graph import UserError
from support.tensor_sources import InMemoryTensors, write_safetensors


@given(sizes=st.lists(st.integers(0, 50), max_size=20), limit=st.integers(1, 60))
def test_split_keeps_order_and_limit(sizes: list[int], limit: int) -> None:
    """All names appear once in order; a file above the limit holds one tensor; no two neighbours would fit in one."""
    given = {f"t{number}": TensorSpec((size,), torch.uint8) for number, size in enumerate(sizes)}
    shards = split_by_size(given, limit)
    totals = [sum(given[name].bytes for name in shard) for shard in shards]
    assert [name for shard in shards for name in shard] == list(given)
    assert all(total <= limit or len(shard) == 1 for total, shard in zip(totals, shards, strict=True))
    firsts = [given[shard[0]].bytes for shard in shards[1:]]
    assert all(total + first > limit for total, first in zip(totals, firsts, strict=False))


def kinds(**sizes: int) -> dict[str, TensorSpec]:
    """Tensors of so many bytes."""
    return {name: TensorSpec((size,), torch.uint8) for name, size in sizes.items()}


def test_files_hold_as_many_names_as_can_be_read() -> None:
    """For tensors of any size, a file's header stays below the reader's limit."""
    shards = split_by_size({f"t{number}": TensorSpec((0,), torch.uint8) for number in range(60_001)}, 1)
    assert [len(shard) for shard in shards] == [30_000, 30_000, 1]


def test_files_of_several_writers_are_numbered_through() -> None:
    """Each writer has its own files, numbered in one sequence; a writer without tensors has none."""
    files = plan_files([kinds(a=5, b=5), {}, kinds(c=20, d=1)], 10)
    assert [(file.name[6:11], file.writer, [*file.specs]) for file in files] == [
        ("00001", 0, ["a", "b"]),
        ("00002", 2, ["c"]),
        ("00003", 2, ["d"]),
    ]
    assert [(file.name, file.writer) for file in plan_files([{}, kinds(a=1)], 10)] == [("model.safetensors", 1)]


def test_duplicate_names_are_refused_before_any_write() -> None:
    """Tensors with the same name on two writers are an error naming both."""
    with pytest.raises(UserError, match="b, c would be written twice, by rank 0 and by rank 2"):
        plan_files([kinds(a=1, b=1, c=1), kinds(d=1), kinds(e=1, b=1, c=1)], 10)


def test_names_that_could_not_be_read_are_refused(tmp_path: Path) -> None:
    """Nothing is written if a name would be refused when it is read again."""
    with pytest.raises(UserError, match=r"'\.\./a' is not a valid name of a tensor"):
        write_safetensors(tmp_path, InMemoryTensors({"../a": torch.ones(1)}), identity("../a"))
    assert os.listdir(tmp_path) == []


def test_tensors_that_do_not_fit_a_mapper_are_reported_before_any_write(tmp_path: Path) -> None:
    """A tensor the mapper can't convert is reported before a file is begun."""
    source = InMemoryTensors({"a": torch.ones(1), "b": torch.ones(2)})
    with pytest.raises(UserError, match="ab can't be made of a, b"):
        write_safetensors(tmp_path, source, stack(["a", "b"], "ab"))
    assert os.listdir(tmp_path) == []


def test_a_plan_is_kept() -> None:
    """Tensors in another order than planned raise ValueError."""
    with TemporaryDirectory() as folder, pytest.raises(ValueError, match="tensor b came where the plan has a"):
        write_files(Path(folder), plan_files([kinds(a=1)], 10), iter([("b", torch.ones(1))]))


@given(
    sizes=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([torch.float32, torch.int8, torch.bool])), min_size=1),
    limit=st.integers(1, 100),
)
def test_written_tensors_are_read_bit_by_bit(sizes: list[tuple[int, torch.dtype]], limit: int) -> None:
    """Any tensors, in any number of files, come back the same, read by us and by the library."""
    tensors = {f"t{n}": torch.randint(0, 2, (size,)).to(dtype) for n, (size, dtype) in enumerate(sizes)}
    with TemporaryDirectory() as folder:
        write_safetensors(Path(folder), InMemoryTensors(tensors), identity(*tensors), limit)
        source = open_safetensors_folder(Path(folder))
        theirs = {
            name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()
        }
        assert source.specs().keys() == theirs.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert source.tensor(name).dtype == theirs[name].dtype == tensor.dtype
            assert torch.equal(source.tensor(name), tensor) and torch.equal(theirs[name], tensor)


def test_one_group_is_in_memory_at_a_time(tmp_path: Path) -> None:
    """A written group is released before the next group is requested."""
    alive: list[weakref.ref[Tensor]] = []

    class Fresh:
        def specs(self) -> dict[str, TensorSpec]:
            return {f"t{number}": TensorSpec((4,), torch.float32) for number in range(9)}

        def tensor(self, name: str) -> Tensor:
            tensor = torch.ones(4)
            alive.append(weakref.ref(tensor))
            assert sum(reference() is not None for reference in alive) <= 4
            return tensor

    pairs = parallel(*(stack([f"t{number}", f"t{number + 1}"], f"s{number}") for number in range(0, 8, 2)))
    write_safetensors(tmp_path, Fresh(), pairs, 40)


def test_one_file_has_no_index(tmp_path: Path) -> None:
    """A single file is `model.safetensors`, marked with torch's format."""
    tensors = {"b": torch.arange(6.0).view(2, 3).T, "a": torch.ones(2, dtype=torch.bfloat16)}
    write_safetensors(tmp_path, InMemoryTensors(tensors), identity("b", "a"), 100)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == tensors.keys()
    assert all(torch.equal(saved[name], tensors[name]) for name in tensors)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_several_files_have_an_index(tmp_path: Path) -> None:
    """File names have number and count, and the index has all tensors' files and the total bytes."""
    tensors = {name: torch.full((4,), float(number)) for number, name in enumerate("abc")}
    write_safetensors(tmp_path, InMemoryTensors(tensors), identity("a", "b", "c"), 32)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {"metadata": {"total_size": 48}, "weight_map": {"a": first, "b": first, "c": second}}
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [first, second]
    assert torch.equal(load_file(tmp_path / second)["c"], tensors["c"])
