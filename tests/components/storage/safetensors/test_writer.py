"""One safetensors file, against the library's own."""

import errno
import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch import Tensor

from drawloom.components.storage.safetensors.writer import DTYPES, create_safetensors_file
from support.tensor_sources import InMemoryTensors

SHAPES = st.lists(st.integers(0, 3), max_size=3)
NAMES = st.text("abc.", min_size=1, max_size=3).filter(lambda name: ".." not in name)
KINDS = st.dictionaries(NAMES, st.tuples(SHAPES, st.sampled_from([*DTYPES.values()])), max_size=6)


def write_file(path: Path, tensors: dict[str, Tensor], order: list[str]) -> bytes:
    """Write tensors in this order, and return the file's bytes."""
    with create_safetensors_file(path, InMemoryTensors(tensors).specs()) as writer:
        for name in order:
            writer.write(name, tensors[name])
    return path.read_bytes()


@given(KINDS, st.integers())
def test_written_bytes_equal_those_of_the_safetensors_library(
    kinds: dict[str, tuple[list[int], torch.dtype]], seed: int
) -> None:
    """In any order of writes, the file is byte for byte the safetensors library's."""
    tensors = {name: torch.randint(0, 2, shape).to(dtype) for name, (shape, dtype) in kinds.items()}
    order = random.Random(seed).sample(sorted(tensors), len(tensors))
    with TemporaryDirectory() as folder:
        assert write_file(Path(folder, "file"), tensors, order) == save(tensors, {"format": "pt"})


def test_tensors_that_were_not_announced_are_refused(tmp_path: Path) -> None:
    """Writing another shape or dtype, and leaving a planned tensor out, raise ValueError."""
    kinds = InMemoryTensors({"a": torch.ones(2), "b": torch.ones(2)}).specs()
    for tensor in (torch.ones(3), torch.ones(2).half()):
        with (
            pytest.raises(ValueError, match=r"a has .* but was planned with"),
            create_safetensors_file(tmp_path / str(tensor.dtype), kinds) as writer,
        ):
            writer.write("a", tensor)
    with (
        pytest.raises(ValueError, match="b were planned, but not written"),
        create_safetensors_file(tmp_path / "missing", kinds) as writer,
    ):
        writer.write("a", torch.ones(2))


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    """An existing file or link with this name is an error, and stays."""
    (tmp_path / "file").write_text("precious")
    with pytest.raises(FileExistsError), create_safetensors_file(tmp_path / "file", {}):
        pytest.fail("it must not open")
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("call", ["pwrite", "fsync"])
def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """An OSError has the name of the file."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left") as caught:
        write_file(tmp_path / "file", {"a": torch.ones(2)}, ["a"])
    assert caught.value.filename == str(tmp_path / "file")


def test_short_writes_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that writes a few bytes at a time still gets all bytes, at their offsets."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:3], offset))
    tensors = {"a": torch.randn(5), "b": torch.randn(2).double()}
    assert write_file(tmp_path / "file", tensors, ["a", "b"]) == save(tensors, {"format": "pt"})
