"""Reading folders of safetensors, good ones and damaged ones."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from drawloom.components.model_state.safetensors_header import DTYPES
from drawloom.components.model_state.safetensors_reading import open_safetensors_folder
from drawloom.components.model_state.tensor_source import TensorKind
from drawloom.graph import UserError

INDEX = "model.safetensors.index.json"


def sharded(folder: Path, weight_map: dict[str, str], **files: list[str]) -> Path:
    """A folder with this index, and files `x.safetensors` that hold tensors of these names."""
    for file, names in files.items():
        save_file({name: torch.full((2,), float(len(name))) for name in names}, folder / f"{file}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_single_file(tmp_path: Path) -> None:
    """Shapes and dtypes are known before a tensor is read."""
    save_file({"a": torch.ones(2, 3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    source = open_safetensors_folder(tmp_path)
    assert source.kinds() == {"a": TensorKind((2, 3), torch.bfloat16)}
    assert torch.equal(source.tensor("a"), torch.ones(2, 3, dtype=torch.bfloat16))


def test_sharded(tmp_path: Path) -> None:
    """Each tensor comes from the file that the index names."""
    weight_map = {"aaa": "x.safetensors", "b": "y.safetensors", "cc": "x.safetensors"}
    source = open_safetensors_folder(sharded(tmp_path, weight_map, x=["aaa", "cc"], y=["b"]))
    assert [source.tensor(name)[0].item() for name in source.kinds()] == [3.0, 1.0, 2.0]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """Each dtype that torch and safetensors share is read as itself."""
    save_file({"a": torch.zeros(3).to(dtype)}, tmp_path / "model.safetensors")
    source = open_safetensors_folder(tmp_path)
    assert source.kinds()["a"].dtype == source.tensor("a").dtype == dtype


def test_differences_are_told_together(tmp_path: Path) -> None:
    """What the index and the files say differently is one message: missing, unexpected and duplicate tensors."""
    weight_map = {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"}
    folder = sharded(tmp_path, weight_map, x=["a", "c", "stray"], y=["c"])
    with pytest.raises(UserError) as caught:
        open_safetensors_folder(folder)
    for part in ("missing b (in x.safetensors)", "unexpected stray (in x.safet", "duplicate c (also in x.safet"):
        assert part in str(caught.value)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\\b", 7, None])
def test_files_outside_the_folder_are_refused(tmp_path: Path, file: str) -> None:
    """An index can only name files of its own folder."""
    with pytest.raises(UserError, match="is no file of the folder"):
        open_safetensors_folder(sharded(tmp_path, {"a": file}))


def test_names_repeated_in_the_index_are_refused(tmp_path: Path) -> None:
    """JSON would let the last of two entries win."""
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "x", "b": "x", "a": "y"}}')
    with pytest.raises(UserError, match="it has 'a' more than once"):
        open_safetensors_folder(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": ["x"]}'])
def test_broken_index(tmp_path: Path, text: str) -> None:
    """An index that is none is a sentence, not a traceback."""
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(UserError, match=r"is not JSON|has no weight_map"):
        open_safetensors_folder(tmp_path)


def test_missing_shard(tmp_path: Path) -> None:
    """A file that the index names and that is not there is named."""
    with pytest.raises(UserError, match=r"x\.safetensors can't be read"):
        open_safetensors_folder(sharded(tmp_path, {"a": "x.safetensors"}))


@pytest.mark.parametrize("content", [b"", b"12345678", b"\xff" * 64])
def test_damaged_file(tmp_path: Path, content: bytes) -> None:
    """A file that is not safetensors is named."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors can't be read as safetensors"):
        open_safetensors_folder(tmp_path)


def test_no_model(tmp_path: Path) -> None:
    """A folder without a model says what was looked for."""
    with pytest.raises(UserError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_safetensors_folder(tmp_path)
