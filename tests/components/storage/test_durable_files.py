"""Effects on the file system."""

import errno
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.storage import durable_files
from drawloom.components.storage.regular_file import CHUNK
from drawloom.components.storage.sha256_stream import BLOCK, Content


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 5])
def test_a_written_file_has_the_bytes_size_and_hash(tmp_path: Path, size: int) -> None:
    """Size and hash are those of the bytes, however many chunks they take."""
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    blocks = [data[start : start + BLOCK] for start in range(0, size, BLOCK)] or [b""]
    expected = Content(size, [hashlib.sha256(block).hexdigest() for block in blocks])
    assert durable_files.write_file(tmp_path / "file", data) == expected
    assert (tmp_path / "file").read_bytes() == data


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that takes three bytes at a time gets all of them in order."""
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:3], offset))
    durable_files.write_file(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    """Creating an existing file raises an error and keeps its content."""
    durable_files.write_file(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        durable_files.write_file(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"


@pytest.mark.parametrize("effect", ["pwrite", "fsync"])
def test_a_failed_fsync_names_the_file_and_is_not_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    """A failed fsync raises an error with the path, is not repeated, and the file is closed."""
    calls = []

    def fail(*_: Any) -> int:
        calls.append(effect)
        raise OSError(errno.ENOSPC, "No space left on device")

    handles = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, effect, fail)
    with pytest.raises(OSError, match="No space left") as caught:
        durable_files.write_file(tmp_path / "file", b"data")
    assert caught.value.filename == str(tmp_path / "file")
    assert calls == [effect]
    assert len(os.listdir("/proc/self/fd")) == handles


def test_removing_nothing_is_fine(tmp_path: Path) -> None:
    """A folder goes with all that it holds; one that is not there is gone already."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("")
    durable_files.remove_folder(tmp_path / "a")
    durable_files.remove_folder(tmp_path / "a")
    assert durable_files.names(tmp_path) == []
    assert durable_files.names(tmp_path / "a") == []
