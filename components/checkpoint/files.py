"""Every effect that checkpoints have on the file system: the one place where it is made to last, and can fail."""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import attrs

CHUNK = 2**20  # bytes that are hashed and written at a time


@attrs.frozen
class Content:
    """What a file holds, as far as one needs to know to tell it from another: its size in bytes and its SHA-256."""

    size: int
    sha256: str


def make_folder(path: Path) -> None:
    """Make a folder that may be there already; its parent is there."""
    path.mkdir(exist_ok=True)


def write_file(path: Path, data: bytes) -> Content:
    """Write a new file down to the disk."""
    digest = hashlib.sha256()
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for start in range(0, len(data), CHUNK):
            chunk = memoryview(data)[start : start + CHUNK]
            digest.update(chunk)
            _write_all(file, chunk, path)
        _sync(file, path)
    finally:
        os.close(file)
    return Content(len(data), digest.hexdigest())


def read_file(path: Path) -> bytes:
    """All of a regular file; OSError for anything else, a pipe say, on which one would wait for ever."""
    return b"".join(_chunks(path))


def content(path: Path) -> Content:
    """Size and SHA-256 of a regular file."""
    digest, size = hashlib.sha256(), 0
    for chunk in _chunks(path):
        digest.update(chunk)
        size += len(chunk)
    return Content(size, digest.hexdigest())


def sync_folder(path: Path) -> None:
    """Make names in a folder last: without this a new file may be gone after a power cut, whole as it was."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _sync(folder, path)
    finally:
        os.close(folder)


def rename(old: Path, new: Path) -> None:
    """Give another name, at once or not at all."""
    os.rename(old, new)


def remove_folder(path: Path) -> None:
    """Remove a folder with all that it holds; nothing if it is not there."""
    if path.exists():
        shutil.rmtree(path)


def names(folder: Path) -> list[str]:
    """What a folder holds, in order; nothing if there is no such folder."""
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def _chunks(path: Path) -> Iterator[bytes]:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # without waiting for a pipe's other end
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(0, "is no regular file", str(path))
        while chunk := os.read(file, CHUNK):
            yield chunk
    finally:
        os.close(file)


def _write_all(file: int, chunk: memoryview, path: Path) -> None:
    while chunk:
        try:
            chunk = chunk[os.write(file, chunk) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error


def _sync(file: int, path: Path) -> None:
    """Once: after a failed fsync the system may have dropped the data, and a second one would succeed for nothing."""
    try:
        os.fsync(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
