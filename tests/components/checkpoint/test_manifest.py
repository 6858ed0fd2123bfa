"""What a checkpoint says of itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import attrs
import hypothesis
import pytest
from hypothesis import strategies as st

from drawloom.components.checkpoint.manifest import CorruptCheckpoint, Manifest, quick_check, read_manifest, verify
from drawloom.components.storage.sha256_stream import Content
from drawloom.components.storage.strict_json import checksum
from drawloom.graph import UserError
from support.checkpoints import save_steps

MANIFEST = Manifest(
    step=7,
    recipe="abc",
    world_size=2,
    replicated=["optimizer"],
    local=["randomness"],
    files={"rank-0.json": Content(3, "00ff" * 16)},
    spread=["stages"],
    values={"loss": 0.1, "grad_norm": None, "tokens": 12},
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with a manifest alone."""
    folder = tmp_path / "step-7"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(MANIFEST.write())
    return folder


def test_a_manifest_comes_back(checkpoint: Path) -> None:
    """Everything in it survives its file, which carries a format number."""
    assert read_manifest(checkpoint) == MANIFEST
    assert json.loads((checkpoint / "manifest.json").read_text())["format"] == 2


def test_no_flipped_bit_goes_unnoticed(checkpoint: Path) -> None:
    """Each single bit of the file is flipped in turn."""
    path, good = checkpoint / "manifest.json", MANIFEST.write()
    for place in range(len(good) * 8 - 8):  # the line end at the end is of no account
        bad = bytearray(good)
        bad[place // 8] ^= 1 << place % 8
        path.write_bytes(bad)
        with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
            read_manifest(checkpoint)


@hypothesis.given(st.binary(max_size=50) | st.from_regex(r'\{"format": 1, "digest": .*\}').map(str.encode))
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_whatever_is_no_manifest_is_damage(checkpoint: Path, data: bytes) -> None:
    """Nonsense of any kind raises Damaged and nothing else."""
    (checkpoint / "manifest.json").write_bytes(data)
    with pytest.raises(CorruptCheckpoint):
        read_manifest(checkpoint)


def test_depth_is_no_way_to_crash(checkpoint: Path) -> None:
    """Brackets without end are damage too."""
    (checkpoint / "manifest.json").write_text("[" * 10**6)
    with pytest.raises(CorruptCheckpoint, match="can't be read"):
        read_manifest(checkpoint)


def test_the_manifest_of_another_step_is_noticed(checkpoint: Path) -> None:
    """A folder that was renamed or copied is not the step that it claims to be."""
    other = checkpoint.rename(checkpoint.with_name("step-8"))
    with pytest.raises(CorruptCheckpoint, match="is of step 7"):
        read_manifest(other)


def test_a_newer_format_is_no_damage(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused with both numbers, instead of being passed over for an older checkpoint."""
    monkeypatch.setattr("drawloom.components.checkpoint.manifest.FORMAT", 3)
    (checkpoint / "manifest.json").write_bytes(MANIFEST.write())
    monkeypatch.undo()
    with pytest.raises(UserError, match="has format 3, and this version of drawloom reads up to 2"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("name", ["../step-6/rank-0.json", "/etc/passwd", "", ".", "..", "a\0b", "manifest.json"])
def test_names_of_files_stay_in_the_folder(checkpoint: Path, name: str) -> None:
    """A manifest with a right digest can still not lead elsewhere."""
    made_up = attrs.evolve(MANIFEST, files={name: Content(1, "00" * 32)})
    (checkpoint / "manifest.json").write_bytes(made_up.write())
    with pytest.raises(CorruptCheckpoint, match="no plain file name"):
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
        {"spread": None},
        {"files": []},
        {"files": {"rank-0.json": {"size": -1, "sha256": "00" * 32}}},
        {"files": {"rank-0.json": {"size": 1, "sha256": "00"}}},
        {"files": {"rank-0.json": {"size": 1}}},
        {"values": {"loss": "low"}},
        {"recipe": None},
        {"more": 1},
    ],
)
def test_what_is_no_manifest_is_damage_even_with_a_right_digest(checkpoint: Path, changes: dict[str, Any]) -> None:
    """Whoever makes one up gets no further than to be refused, with the entry that is wrong."""
    content = json.loads(MANIFEST.write())
    del content["digest"]
    content |= changes
    (checkpoint / "manifest.json").write_text(json.dumps(content | {"digest": checksum(content)}))
    with pytest.raises(
        CorruptCheckpoint, match=r"^manifest.json has (other entries|something else .* as " + min(changes) + ")"
    ):
        read_manifest(checkpoint)


def test_a_link_is_no_checkpoint(checkpoint: Path) -> None:
    """Nothing is read through it."""
    elsewhere = checkpoint.rename(checkpoint.with_name("elsewhere"))
    checkpoint.symlink_to(elsewhere)
    with pytest.raises(CorruptCheckpoint, match="link"):
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
    with pytest.raises(CorruptCheckpoint) as caught:
        verify(folder)
    assert str(caught.value).split("; ") == [
        "rank-0.json is missing",
        "rank-1.json does not belong there",
        "rank-0.safetensors has other bytes than were committed",
        "recipe.lock.toml has 0 bytes instead of 11",
    ]


def test_a_look_is_enough_for_missing_and_short_files(tmp_path: Path) -> None:
    """What can be seen without reading the tensors: names and sizes."""
    save_steps(tmp_path, 3)
    folder = tmp_path / "checkpoints" / "step-3"
    assert quick_check(folder)
    for damage in ("rank-0.safetensors", "manifest.json"):
        copy = tmp_path / damage / "step-3"
        shutil.copytree(folder, copy)
        (copy / damage).write_bytes((copy / damage).read_bytes()[:-2])
        assert not quick_check(copy)
        (copy / damage).unlink()
        assert not quick_check(copy)
