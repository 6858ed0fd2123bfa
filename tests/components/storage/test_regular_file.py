"""Opening files that a stranger put into a folder."""

import os
import socket
import time
from pathlib import Path

import pytest

from drawloom.components.storage.regular_file import open_regular_file
from drawloom.graph import UserError


def made(folder: Path, kind: str) -> Path:
    """Something of a kind that is no regular file."""
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


def test_reads_from_a_place_on(tmp_path: Path) -> None:
    """Parts of a file are read wherever they lie."""
    (tmp_path / "file").write_bytes(b"0123456789")
    with open_regular_file(tmp_path / "file") as file:
        assert (file.size, file.read(3, 4), file.read(10, 0)) == (10, b"3456", b"")


KINDS = ["pipe", "socket", "folder", "device", "link", "link that leads out", "dangling link"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    """Nothing else is opened, so that nothing waits for the other end of a pipe, and no link is followed."""
    path = made(tmp_path, kind)
    began = time.perf_counter()
    with pytest.raises(UserError) as caught, open_regular_file(path):
        pytest.fail("it must not open")
    assert time.perf_counter() - began < 1
    assert str(path) in str(caught.value)
    assert ("symbolic link" in str(caught.value)) == ("link" in kind)


@pytest.mark.parametrize("name", ["gone", "nul\0", "x" * 300])
def test_what_can_not_be_is_a_sentence(tmp_path: Path, name: str) -> None:
    """Names of nothing, and names that no file can have, are told."""
    with pytest.raises(UserError, match="can't be read"), open_regular_file(tmp_path / name):
        pytest.fail("it must not open")


def test_a_file_cut_short_meanwhile_is_told(tmp_path: Path) -> None:
    """A file that ends before what was promised is an error, not a crash and not zeros."""
    (tmp_path / "file").write_bytes(b"0123456789")
    with open_regular_file(tmp_path / "file") as file:
        os.truncate(tmp_path / "file", 4)
        with pytest.raises(UserError, match="file ends after 4 bytes"):
            file.read(2, 5)
