"""One rank's place in a shared folder, and all its possible faults."""

import json
import os
import pickle
import re
import secrets
import threading
import time
from pathlib import Path

import pytest
import torch

from drawloom.components.storage.state_tree import PackedState
from drawloom.components.storage.strict_json import hash_canonical
from drawloom.components.workspace import shared_folder
from drawloom.components.workspace.shared_folder import publish_record, read_record, remove_record
from drawloom.graph import UserError


def parcel(number: float = 1.0) -> PackedState:
    """Return a configuration and two tensors."""
    return PackedState({"number": number}, {"a": torch.full((3,), number), "b": torch.ones(2, dtype=torch.bfloat16)})


def files(folder: Path) -> list[str]:
    """List the folder's files."""
    return sorted(os.listdir(folder))


def test_a_published_record_is_read(tmp_path: Path) -> None:
    """A published record is read back; a rank without a record gives None."""
    publish_record(tmp_path, 3, parcel())
    published = read_record(tmp_path, 3)
    assert published is not None
    assert published.tree == {"number": 1.0}
    assert published.tensors.keys() == {"a", "b"}
    assert torch.equal(published.tensors["b"], torch.ones(2, dtype=torch.bfloat16))
    assert read_record(tmp_path, 2) is None


def test_a_rank_has_one_generation_published(tmp_path: Path) -> None:
    """Publishing again replaces the earlier generation, tensors included, and leaves other ranks' files alone."""
    publish_record(tmp_path, 1, parcel())
    publish_record(tmp_path, 11, parcel(11.0))
    second = publish_record(tmp_path, 1, parcel(2.0))
    assert files(tmp_path)[0].startswith(f"rank-1-{second}") or f"rank-1-{second}.safetensors" in files(tmp_path)
    assert len(files(tmp_path)) == 4
    published, other = read_record(tmp_path, 1, second), read_record(tmp_path, 11)
    assert published is not None and other is not None
    assert (published.tree, other.tree) == ({"number": 2.0}, {"number": 11.0})


def test_withdrawing_removes_the_files_of_the_rank(tmp_path: Path) -> None:
    """Withdrawing removes all files ever left for the rank by any process, and nothing else."""
    publish_record(tmp_path, 1, parcel())
    publish_record(tmp_path, 12, parcel())
    (tmp_path / "rank-1-0123456789abcdef.safetensors").write_text("of a dead process")
    (tmp_path / ".rank-1.json.tmp").write_text("of a dead process")
    (tmp_path / "rank-1.txt").write_text("somebody else's")
    remove_record(tmp_path, 1)
    assert read_record(tmp_path, 1) is None
    assert [name for name in files(tmp_path) if not name.startswith("rank-12")] == ["rank-1.txt"]


def test_every_flipped_byte_is_detected(tmp_path: Path) -> None:
    """With any changed byte in any file, reading is an error naming the file."""
    publish_record(tmp_path, 0, parcel())
    for path in sorted(tmp_path.iterdir()):
        good = path.read_bytes()
        for offset in range(0, len(good), 7):
            path.write_bytes(good[:offset] + bytes([good[offset] ^ 1]) + good[offset + 1 :])
            with pytest.raises(UserError, match=re.escape(str(tmp_path))):
                read_record(tmp_path, 0)
        for wrong in (good[:-1], good + b" ", b"", pickle.dumps({"number": 1.0})):
            path.write_bytes(wrong)
            if path.suffix == ".json" and wrong == good + b" ":
                continue  # a space behind JSON is nothing
            with pytest.raises(UserError, match=re.escape(str(tmp_path))):
                read_record(tmp_path, 0)
        path.write_bytes(good)
    assert read_record(tmp_path, 0) is not None


@pytest.mark.parametrize("changes", [{"rank": 1}, {"format": 2}, {"generation": "../../etc/passwd"}, {"tensors": {}}])
def test_a_record_of_something_else_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    """A record with a good digest is believed only for its own rank and format, and can't name files elsewhere."""
    publish_record(tmp_path, 0, parcel())
    path = tmp_path / "rank-0.json"
    record = json.loads(path.read_bytes()) | changes
    del record["digest"]
    path.write_text(json.dumps({**record, "digest": hash_canonical(record)}))
    with pytest.raises(UserError, match=r"rank-0\.json is corrupt"):
        read_record(tmp_path, 0)


@pytest.mark.parametrize("name", ["json", "safetensors"])
def test_links_and_pipes_are_not_read(tmp_path: Path, name: str) -> None:
    """Everything but a plain file is refused at once."""
    publish_record(tmp_path, 0, parcel())
    (path,) = tmp_path.glob(f"*.{name}")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="symbolic link"):
        read_record(tmp_path, 0)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="not a regular file"):
        read_record(tmp_path, 0)


def test_a_late_generation_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If storage shows an old record for a while, the reader waits for the new one."""
    publish_record(tmp_path, 0, parcel())
    monkeypatch.setattr(secrets, "token_hex", lambda _: "0123456789abcdef")
    late = threading.Timer(0.3, publish_record, (tmp_path, 0, parcel(2.0)))
    late.start()
    published = read_record(tmp_path, 0, "0123456789abcdef")
    late.join()
    assert published is not None and published.tree == {"number": 2.0}


def test_a_generation_that_never_comes_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting ends with an error naming the rank; a stale record from another run is not accepted."""
    monkeypatch.setattr(shared_folder, "READ_TIMEOUT", 0.2)
    for leftover in (False, True):
        if leftover:
            publish_record(tmp_path, 0, parcel())
        began = time.monotonic()
        with pytest.raises(UserError, match=r"rank-0\.json does not contain the record written by rank 0"):
            read_record(tmp_path, 0, "0123456789abcdef")
        assert 0.2 < time.monotonic() - began < 5


def test_a_reader_never_sees_two_generations_mixed(tmp_path: Path) -> None:
    """While generations replace each other, a read returns one whole generation."""
    publish_record(tmp_path, 0, parcel(0.0))
    over = threading.Event()

    def write() -> None:
        for number in range(1, 60):
            publish_record(tmp_path, 0, parcel(float(number)))
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = set()
    while not over.is_set():
        published = read_record(tmp_path, 0)
        assert published is not None
        assert published.tensors["a"].tolist() == [published.tree["number"]] * 3
        seen.add(published.tree["number"])
    writer.join()
    assert len(seen) > 1


def test_a_published_record_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors are on disk before the JSON, the JSON before its rename, and the folder after it."""
    log: list[str] = []
    fsync, rename = os.fsync, os.rename

    def log_fsync(descriptor: int) -> None:
        log.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).suffix or "folder")
        fsync(descriptor)

    def log_rename(old: Path, new: Path) -> None:
        log.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "rename", log_rename)
    publish_record(tmp_path, 0, parcel())
    assert log == [".safetensors", ".tmp", "rename", "folder"]


def test_a_failed_publish_leaves_no_files(tmp_path: Path) -> None:
    """A tensor in a dtype unknown to the file format is refused before anything is published."""
    with pytest.raises(ValueError, match="complex128"):
        publish_record(tmp_path, 0, PackedState({}, {"a": torch.ones(1, dtype=torch.complex128)}))
    with pytest.raises(ValueError, match="not a valid name of a tensor"):
        publish_record(tmp_path, 0, PackedState({}, {"../a": torch.ones(1)}))
    assert files(tmp_path) == []
