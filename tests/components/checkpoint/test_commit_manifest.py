"""The checkpoint manifest."""

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import hypothesis
import pytest
from hypothesis import strategies as st

from drawloom.components.checkpoint.commit import CorruptCheckpointError, Manifest, hash_manifest
from drawloom.components.checkpoint.reader import read_manifest, read_manifest_if_sizes_match, verify_checkpoint
from drawloom.components.storage.durable_files import FileDigest
from drawloom.graph import UserError
from support.checkpoints import save_steps

MANIFEST = Manifest(
    step=7,
    recipe="abc",
    world_size=2,
    replicated=["optimizer"],
    local=["randomness"],
    files={"rank-0.json": FileDigest(3, ["00ff" * 16])},
    sharded=["stages"],
    values={"loss": 0.1, "grad_norm": None, "tokens": 12},
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a folder with nothing but a manifest."""
    folder = tmp_path / "step-7"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(MANIFEST.to_json_bytes())
    return folder


def test_a_manifest_survives_its_file(checkpoint: Path) -> None:
    """Every field is read back, and the file has a format number."""
    assert read_manifest(checkpoint) == MANIFEST
    assert json.loads((checkpoint / "manifest.json").read_text())["format"] == 3


def test_every_flipped_bit_is_detected(checkpoint: Path) -> None:
    """Every single bit in the file is flipped in turn."""
    path, good = checkpoint / "manifest.json", MANIFEST.to_json_bytes()
    for bit in range(len(good) * 8 - 8):  # the line end at the end is of no account
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
            read_manifest(checkpoint)


@hypothesis.given(st.binary(max_size=50) | st.from_regex(r'\{"format": 1, "digest": .*\}').map(str.encode))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_an_invalid_manifest_is_corrupt(checkpoint: Path, data: bytes) -> None:
    """Invalid content of any kind raises CorruptCheckpointError and nothing else."""
    (checkpoint / "manifest.json").write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        read_manifest(checkpoint)


def test_deep_nesting_is_corrupt(checkpoint: Path) -> None:
    """Endless brackets raise CorruptCheckpointError and no RecursionError."""
    (checkpoint / "manifest.json").write_text("[" * 10**6)
    with pytest.raises(CorruptCheckpointError, match="can't be read"):
        read_manifest(checkpoint)


def test_the_manifest_of_another_step_is_corrupt(checkpoint: Path) -> None:
    """A renamed or copied folder is not accepted as another step."""
    other = checkpoint.rename(checkpoint.with_name("step-8"))
    with pytest.raises(CorruptCheckpointError, match="has step 7, and the folder's name"):
        read_manifest(other)


@pytest.mark.parametrize("other", [2, 4])
def test_another_format_is_a_user_error(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, other: int) -> None:
    """It is refused with both numbers, instead of falling back to an older checkpoint."""
    monkeypatch.setattr("drawloom.components.checkpoint.commit.FORMAT", other)
    (checkpoint / "manifest.json").write_bytes(MANIFEST.to_json_bytes())
    monkeypatch.undo()
    with pytest.raises(UserError, match=f"has format {other}, and this version of drawloom reads format 3"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("name", ["../step-6/rank-0.json", "/etc/passwd", "", ".", "..", "a\0b", "manifest.json"])
def test_file_names_cannot_leave_the_folder(checkpoint: Path, name: str) -> None:
    """A manifest with a valid checksum can't name files elsewhere."""
    made_up = attrs.evolve(MANIFEST, files={name: FileDigest(1, ["00" * 32])})
    (checkpoint / "manifest.json").write_bytes(made_up.to_json_bytes())
    with pytest.raises(CorruptCheckpointError, match="not a plain file name"):
        read_manifest(checkpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -7},
        {"step": 7.0},
        {"step": 2**70},
        {"world_size": 0},
        {"world_size": True},
        {"replicated": "optimizer"},
        {"local": [1]},
        {"sharded": None},
        {"files": []},
        {"files": {"rank-0.json": {"size": -1, "blocks": ["00" * 32]}}},
        {"files": {"rank-0.json": {"size": 1, "blocks": ["00"]}}},
        {"files": {"rank-0.json": {"size": 1, "blocks": "00" * 32}}},
        {"files": {"rank-0.json": {"size": 1, "blocks": []}}},
        {"files": {"rank-0.json": {"size": 2**22 + 1, "blocks": ["00" * 32]}}},
        {"files": {"rank-0.json": {"size": 1}}},
        {"values": {"loss": "low"}},
        {"recipe": None},
        {"more": 1},
    ],
)
def test_invalid_entries_are_corrupt_despite_a_valid_checksum(checkpoint: Path, changes: dict[str, Any]) -> None:
    """A forged manifest is refused, with the invalid entry in the message."""
    content = json.loads(MANIFEST.to_json_bytes())
    del content["digest"]
    content |= changes
    (checkpoint / "manifest.json").write_text(json.dumps(content | {"digest": hash_manifest(content)}))
    with pytest.raises(
        CorruptCheckpointError,
        match=r"^manifest.json (has missing or unknown entries|has an invalid value of '" + min(changes) + ")",
    ):
        read_manifest(checkpoint)


def test_a_symbolic_link_is_not_a_checkpoint(checkpoint: Path) -> None:
    """Nothing is read through a link."""
    elsewhere = checkpoint.rename(checkpoint.with_name("elsewhere"))
    checkpoint.symlink_to(elsewhere)
    with pytest.raises(CorruptCheckpointError, match="link"):
        read_manifest(checkpoint)


def test_all_faults_of_a_checkpoint_are_listed_at_once(tmp_path: Path) -> None:
    """Missing, extra, truncated and changed files are each named in one message."""
    save_steps(tmp_path, 3)
    folder = tmp_path / "checkpoints" / "step-3"
    (folder / "rank-0.json").unlink()
    (folder / "rank-1.json").write_text("{}")
    (folder / "recipe.lock.toml").write_text("")
    tensors = bytearray((folder / "rank-0.safetensors").read_bytes())
    tensors[-1] ^= 1
    (folder / "rank-0.safetensors").write_bytes(tensors)
    with pytest.raises(CorruptCheckpointError) as caught:
        verify_checkpoint(folder)
    assert str(caught.value).split("; ") == [
        "rank-0.json is missing",
        "rank-1.json is not in the manifest",
        f"rank-0.safetensors has a checksum mismatch in bytes 0 to {len(tensors)}",
        "recipe.lock.toml has 0 bytes instead of 11",
    ]


def test_the_quick_check_finds_missing_and_short_files(tmp_path: Path) -> None:
    """Names and sizes are checked without reading the tensors."""
    save_steps(tmp_path, 3)
    folder = tmp_path / "checkpoints" / "step-3"
    assert read_manifest_if_sizes_match(folder)
    for name in ("rank-0.safetensors", "manifest.json"):
        copy = tmp_path / name / "step-3"
        shutil.copytree(folder, copy)
        (copy / name).write_bytes((copy / name).read_bytes()[:-2])
        assert not read_manifest_if_sizes_match(copy)
        (copy / name).unlink()
        assert not read_manifest_if_sizes_match(copy)
