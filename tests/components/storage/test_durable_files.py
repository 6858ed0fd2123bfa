"""Effects on the file system."""

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.storage import durable_files
from drawloom.components.storage.durable_files import BLOCK, CHUNK, FileDigest, replace_file


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 5])
def test_a_written_file_has_the_bytes_size_and_hash(tmp_path: Path, size: int) -> None:
    """Size and hash cover all bytes, however many chunks they take."""
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    blocks = [data[start : start + BLOCK] for start in range(0, size, BLOCK)] or [b""]
    expected = FileDigest(size, [hashlib.sha256(block).hexdigest() for block in blocks])
    assert durable_files.create_file_with_content(tmp_path / "file", data) == expected
    assert (tmp_path / "file").read_bytes() == data


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that accepts three bytes at a time gets all bytes in order."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:3], offset))
    durable_files.create_file_with_content(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    """Creating an existing file raises an error and keeps its content."""
    durable_files.create_file_with_content(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        durable_files.create_file_with_content(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"


@pytest.mark.parametrize("effect", ["pwrite", "fsync"])
def test_a_failed_write_or_fsync_names_the_file_and_is_not_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    """A failed write or fsync raises an error with the path, is not repeated, and the file is closed."""
    calls = []

    def fail(*_: Any) -> int:
        calls.append(effect)
        raise OSError(errno.ENOSPC, "No space left on device")

    handles = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, effect, fail)
    with pytest.raises(OSError, match="No space left") as caught:
        durable_files.create_file_with_content(tmp_path / "file", b"data")
    assert caught.value.filename == str(tmp_path / "file")
    assert calls == [effect]
    assert len(os.listdir("/proc/self/fd")) == handles


def test_removing_nothing_is_fine(tmp_path: Path) -> None:
    """A folder goes with its contents; a missing one is gone already."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("")
    durable_files.remove_file_or_folder(tmp_path / "a")
    durable_files.remove_file_or_folder(tmp_path / "a")
    assert durable_files.list_folder(tmp_path) == []
    assert durable_files.list_folder(tmp_path / "a") == []


def test_a_pipe_is_removed_without_opening_it(tmp_path: Path) -> None:
    """Nothing waits for a pipe's writer if the pipe has a leftover's name, for a folder or a file."""
    for name in ("pipe", ".file.tmp"):
        os.mkfifo(tmp_path / name)
    durable_files.remove_file_or_folder(tmp_path / "pipe")
    durable_files.replace_file(tmp_path / "file", b"content")
    assert durable_files.list_folder(tmp_path) == ["file"]


def test_a_replaced_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new content is flushed before the rename, the name after it, and the old content is whole until then."""
    path, log = tmp_path / "file", list[str]()
    path.write_text("old")
    fsync, rename = os.fsync, os.rename

    def log_fsync(descriptor: int) -> None:
        log.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}: {path.read_text()}")
        fsync(descriptor)

    def log_rename(old: Path, new: Path) -> None:
        log.append("rename")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", log_fsync)
    monkeypatch.setattr(os, "rename", log_rename)
    replace_file(path, b"new")
    assert log == ["fsync .file.tmp: old", "rename", f"fsync {tmp_path.name}: new"]


def test_a_file_that_cannot_be_replaced_keeps_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk keeps the old content, and nothing beside it; a killed process's leftover is no obstacle."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "file"
    path.write_text("old")
    (tmp_path / ".file.tmp").write_text("half")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(os, "fsync", full)
        replace_file(path, b"new")
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["file"])
    (tmp_path / ".file.tmp").write_text("half")
    replace_file(path, b"new")
    assert (path.read_text(), os.listdir(tmp_path)) == ("new", ["file"])
