"""Opening files in a stranger's folder."""

import os
import socket
import time
from pathlib import Path

import pytest

from drawloom.components.storage.durable_files import (
    CHUNK,
    create_folder_unless_link,
    open_to_append,
    open_untrusted_file,
    read_file,
)
from drawloom.graph import UserError


def make_special_file(folder: Path, kind: str) -> Path:
    """Make something other than a regular file."""
    path = folder / "model.safetensors"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        return Path("/dev/zero")
    else:
        (folder / "real").write_bytes(b"12345678")
        path.symlink_to({"link": "real", "link that leads out": "/etc/passwd", "dangling link": "gone"}[kind])
    return path


def test_a_part_is_read_from_its_offset(tmp_path: Path) -> None:
    """Parts of a file are read wherever they lie."""
    (tmp_path / "file").write_bytes(b"0123456789")
    with open_untrusted_file(tmp_path / "file") as file:
        assert (file.size, file.read(3, 4), file.read(10, 0)) == (10, b"3456", b"")


KINDS = ["pipe", "socket", "folder", "device", "link", "link that leads out", "dangling link"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_path_that_is_not_a_regular_file_is_refused_without_blocking(tmp_path: Path, kind: str) -> None:
    """Nothing else is opened, so nothing waits for a pipe's other end, and no link is followed."""
    path = make_special_file(tmp_path, kind)
    began = time.perf_counter()
    with pytest.raises(UserError) as caught, open_untrusted_file(path):
        pytest.fail("it must not open")
    assert time.perf_counter() - began < 1
    assert str(path) in str(caught.value)
    assert ("symbolic link" in str(caught.value)) == ("link" in kind)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_written_through_a_path_that_is_not_a_regular_file(tmp_path: Path, kind: str) -> None:
    """A run folder from a stranger makes no run write to a file outside of it, and none wait for a pipe."""
    path = make_special_file(tmp_path, kind)
    began = time.perf_counter()
    with pytest.raises(UserError, match="can't be written") as caught:
        open_to_append(path)
    assert time.perf_counter() - began < 1
    assert str(path) in str(caught.value)
    assert not (tmp_path / "gone").exists()


def test_a_new_file_is_created_and_an_old_one_appended_to(tmp_path: Path) -> None:
    """A file's old contents stay."""
    for word in (b"one", b"two"):
        descriptor = open_to_append(tmp_path / "file")
        os.write(descriptor, word)
        os.close(descriptor)
    assert (tmp_path / "file").read_bytes() == b"onetwo"


@pytest.mark.parametrize("kind", ["pipe", "link", "link that leads out", "dangling link"])
def test_a_folder_that_is_a_link_or_a_file_is_refused(tmp_path: Path, kind: str) -> None:
    """A link to a folder elsewhere would make every file in it one outside."""
    path = make_special_file(tmp_path, kind)
    with pytest.raises(UserError, match="can't be opened for writing"):
        create_folder_unless_link(path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "log").symlink_to("elsewhere")
    with pytest.raises(UserError, match="it is a symbolic link"):
        create_folder_unless_link(tmp_path / "log")


@pytest.mark.parametrize("name", ["gone", "nul\0", "x" * 300])
def test_an_unreadable_file_is_a_user_error_with_a_remedy(tmp_path: Path, name: str) -> None:
    """Missing files and impossible file names are user errors."""
    with pytest.raises(UserError, match="can't be read"), open_untrusted_file(tmp_path / name):
        pytest.fail("it must not open")


def test_a_file_truncated_while_read_is_an_error(tmp_path: Path) -> None:
    """A file shorter than promised is an error, not a crash and not zeros."""
    (tmp_path / "file").write_bytes(b"0123456789")
    with pytest.raises(UserError, match="it ends after 4 bytes"), open_untrusted_file(tmp_path / "file") as file:
        os.truncate(tmp_path / "file", 4)
        file.read(2, 5)


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 5])
def test_a_whole_file_is_read(tmp_path: Path, size: int) -> None:
    """All bytes are read, also if they are read in several chunks."""
    data = (bytes(range(251)) * (size // 251 + 1))[:size]
    (tmp_path / "file").write_bytes(data)
    assert read_file(tmp_path / "file", size) == data


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """The caller bounds a file's size."""
    (tmp_path / "file").write_bytes(bytes(10))
    with pytest.raises(OSError, match="it has 10 bytes, and more than 9 are not read"):
        read_file(tmp_path / "file", 9)
