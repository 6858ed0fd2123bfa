"""Reading folders of safetensors, good ones and damaged ones."""

import json
import os
import pickle
import re
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.components.storage.safetensors.writer import DTYPES
from drawloom.components.storage.tensor_source import TensorSpec
from drawloom.graph import UserError

INDEX = "model.safetensors.index.json"


def write_shards(folder: Path, weight_map: Mapping[str, object], **files: list[str]) -> Path:
    """Make a folder with this index, and files `x.safetensors` with tensors under these names."""
    for file, names in files.items():
        save_file({name: torch.full((2,), float(len(name))) for name in names}, folder / f"{file}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_specs_are_known_before_reading(tmp_path: Path) -> None:
    """Shapes and dtypes are known before a tensor is read."""
    save_file({"a": torch.ones(2, 3, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    source = open_safetensors_folder(tmp_path)
    assert source.specs() == {"a": TensorSpec((2, 3), torch.bfloat16)}
    assert torch.equal(source.tensor("a"), torch.ones(2, 3, dtype=torch.bfloat16))


def test_tensors_are_read_from_their_shards(tmp_path: Path) -> None:
    """Every tensor comes from the file named in the index."""
    weight_map = {"aaa": "x.safetensors", "b": "y.safetensors", "cc": "x.safetensors"}
    source = open_safetensors_folder(write_shards(tmp_path, weight_map, x=["aaa", "cc"], y=["b"]))
    assert [source.tensor(name)[0].item() for name in source.specs()] == [3.0, 1.0, 2.0]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_dtype_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    """Every dtype shared by torch and safetensors is read as itself."""
    save_file({"a": torch.zeros(3).to(dtype)}, tmp_path / "model.safetensors")
    source = open_safetensors_folder(tmp_path)
    assert source.specs()["a"].dtype == source.tensor("a").dtype == dtype


def test_differences_of_index_and_files_are_listed_together(tmp_path: Path) -> None:
    """Missing, unexpected and duplicate tensors of index and files are listed in one message."""
    weight_map = {"a": "x.safetensors", "b": "x.safetensors", "c": "y.safetensors"}
    folder = write_shards(tmp_path, weight_map, x=["a", "c", "stray"], y=["c"])
    with pytest.raises(UserError) as caught:
        open_safetensors_folder(folder)
    for part in ("missing b (in x.safetensors)", "unexpected stray (in x.safet", "duplicate c (also in x.safet"):
        assert part in str(caught.value)


OUTSIDE = [
    "../x.safetensors",
    "/etc/passwd",
    "sub/x.safetensors",
    "..",
    ".",
    "",
    "a\\b",
    "C:x",
    "a\0b",
    "\n",
    7,
    None,
    ["x"],
]


@pytest.mark.parametrize("file", OUTSIDE)
def test_files_outside_the_folder_are_refused(tmp_path: Path, file: object) -> None:
    """An index can only name files of its own folder, and the refusal names index, tensor and file."""
    with pytest.raises(UserError, match="is not a plain file name") as caught:
        open_safetensors_folder(write_shards(tmp_path, {"some.tensor": file}))
    assert str(tmp_path / INDEX) in str(caught.value)
    assert "'some.tensor'" in str(caught.value)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "x.safetensors"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str, name: str) -> None:
    """A link, a pipe or a folder in the place of any file is refused at once, and named."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    save_file({"a": torch.ones(2)}, elsewhere / "x.safetensors")
    folder = write_shards(tmp_path, {"a": "x.safetensors"}, x=["a"])
    (folder / name).unlink(missing_ok=True)
    if kind == "link":
        (folder / name).symlink_to(elsewhere / "x.safetensors")
    elif kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).mkdir()
    began = time.perf_counter()
    with pytest.raises(UserError, match=f"{re.escape(str(folder / name))} can't be read .it is "):
        open_safetensors_folder(folder)
    assert time.perf_counter() - began < 1


def test_nothing_else_is_opened(tmp_path: Path) -> None:
    """For any index, no file outside of the folder is opened, as an audit hook shows."""
    opened: list[str] = []
    watching = False
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if watching and event == "open" else None)
    (tmp_path / "secret").write_text("secret")
    for number, file in enumerate(("../secret", "/etc/passwd", "link", "fine.safetensors")):
        (tmp_path / str(number)).mkdir()
        folder = write_shards(tmp_path / str(number), {"a": file}, fine=["a"])
        (folder / "link").symlink_to(tmp_path / "secret")
        watching = True
        with suppress(UserError):
            open_safetensors_folder(folder)
        watching = False
    assert any(path.endswith("fine.safetensors") for path in opened)
    assert not [path for path in opened if "secret" in path or "passwd" in path or path.endswith("link")]


TEXTS = {
    "no JSON": ("{", "is not readable JSON"),
    "no object": ("[]", "has no weight_map"),
    "no map": ("{}", "has no weight_map"),
    "empty map": ('{"weight_map": {}}', "has no weight_map"),
    "map no object": ('{"weight_map": ["x"]}', "has no weight_map"),
    "names twice": ('{"weight_map": {"a": "x", "b": "x", "a": "y"}}', "it has 'a' more than once"),
    "maps twice": ('{"weight_map": {"a": "x"}, "weight_map": {"a": "x"}}', "it has 'weight_map' more than once"),
    "NaN": ('{"weight_map": NaN}', "NaN is not a finite number"),
    "nested": ('{"weight_map": ' + "[" * 100_000, "is not readable JSON"),
    "too many": ('{"weight_map": {' + '"t": "x", ' * 400_000 + '"t": "x"}}', "values, above the limit of 750000"),
    "too long": (" " * (33 * 2**20), "above the limit of 33554432"),
    "negative size": ('{"metadata": {"total_size": -1}, "weight_map": {"a": "x"}}', "total_size = -1"),
    "vast size": ('{"metadata": {"total_size": 1180591620717411303424}, "weight_map": {"a": "x"}}', "total_size = 118"),
    "broken size": ('{"metadata": {"total_size": 1.5}, "weight_map": {"a": "x"}}', "total_size = 1.5"),
    "size no number": ('{"metadata": {"total_size": "8"}, "weight_map": {"a": "x"}}', "total_size = '8'"),
    "many files": (json.dumps({"weight_map": {f"t{n}": f"x{n}" for n in range(10_001)}}), "names 10001 files"),
}


@pytest.mark.parametrize(("text", "message"), TEXTS.values(), ids=TEXTS.keys())
def test_a_broken_index_is_refused(tmp_path: Path, text: str, message: str) -> None:
    """A malformed or oversized index is refused with one sentence within a second, naming the file."""
    (tmp_path / INDEX).write_text(text)
    began = time.process_time()
    with pytest.raises(UserError) as caught:
        open_safetensors_folder(tmp_path)
    assert time.process_time() - began < 1
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / INDEX))


@given(
    st.binary(max_size=60)
    | st.from_regex(r'\{"weight_map": ?\{"a": ?"[a-z./]{0,4}"[,}]{0,2}\}?', fullmatch=True).map(str.encode)
)
def test_any_index_is_read_or_refused(text: bytes) -> None:
    """No index raises anything but a UserError."""
    with TemporaryDirectory() as folder:
        Path(folder, INDEX).write_bytes(text)
        with pytest.raises(UserError):
            open_safetensors_folder(Path(folder))


def test_a_wrong_total_size_is_reported(tmp_path: Path) -> None:
    """An index whose byte count contradicts its files belongs to other files; one without a count is fine."""
    folder = write_shards(tmp_path, {"a": "x.safetensors"}, x=["a"])
    assert open_safetensors_folder(folder).specs().keys() == {"a"}
    for total, fits in ((8, True), (8.0, True), (9, False)):
        index = {"metadata": {"total_size": total}, "weight_map": {"a": "x.safetensors"}}
        (folder / INDEX).write_text(json.dumps(index))
        if fits:
            assert open_safetensors_folder(folder).specs().keys() == {"a"}
        else:
            with pytest.raises(UserError, match="its total_size is 9, and the tensors have 8 bytes"):
                open_safetensors_folder(folder)


def test_long_lists_are_cut(tmp_path: Path) -> None:
    """When thousands of tensors are missing, some are named and the others counted."""
    weight_map = {f"t{number}": "x.safetensors" for number in range(5000)}
    with pytest.raises(UserError, match="and 4989 more") as caught:
        open_safetensors_folder(write_shards(tmp_path, weight_map, x=["t0", "u"]))
    assert len(str(caught.value)) < 1000


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    """The error names the absent file, and a tensor it should contain."""
    with pytest.raises(UserError, match=r"places 'a' in 'x\.safetensors': .*x\.safetensors can't be read"):
        open_safetensors_folder(write_shards(tmp_path, {"a": "x.safetensors"}))


@pytest.mark.parametrize("content", [b"", b"12345678", b"\xff" * 64, pickle.dumps({"a": 1})])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    """A file in another format is named, also a pickle."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors can't be read as safetensors"):
        open_safetensors_folder(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """A truncated file is refused before a read, or during one if it is truncated later."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, path)
    source = open_safetensors_folder(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(UserError, match="was changed while a was read"):
        source.tensor("a")
    with pytest.raises(UserError, match="file not fully covered"):
        open_safetensors_folder(tmp_path)


def test_a_file_swapped_for_another_is_noticed(tmp_path: Path) -> None:
    """The checked file is read, or nothing is."""
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    source = open_safetensors_folder(tmp_path)
    save_file({"a": torch.zeros(100)}, tmp_path / "other")
    (tmp_path / "other").replace(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="was changed while a was read"):
        source.tensor("a")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """A folder without a model, and a path that is not a folder, are errors with the expected files."""
    with pytest.raises(UserError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_safetensors_folder(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        open_safetensors_folder(tmp_path / "gone")
