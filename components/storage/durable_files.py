"""Every effect that checkpoints have on the file system: the one place where it is made to last, and can fail."""

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from drawloom.components.storage.sha256_stream import Sha256Stream

CHUNK = 2**22  # bytes that are read or written at a time
SMALL = 2**16  # bytes; smaller parts are written together


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
    return write_parts(path, [memoryview(data)])


def write_parts(path: Path, parts: Iterable[memoryview]) -> Content:
    """Write a new file of these parts down to the disk. No part is changed before all are written."""
    size = 0
    with Sha256Stream() as digest:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            for chunk in _chunks(parts):
                size += len(chunk)
                digest.update(chunk)
                _write_all(file, chunk, path)
            _sync(file, path)
        finally:
            os.close(file)
        return Content(size, digest.hex())


class Reading:
    """A file that is read once from its beginning to its end, and digested meanwhile."""

    def __init__(self, path: Path, file: int, digest: Sha256Stream) -> None:
        self.size = os.fstat(file).st_size
        self.done = 0
        self._path = path
        self._file = file
        self._digest = digest

    def fill(self, buffer: memoryview) -> None:
        """Read the next bytes into memory that stays as it is; OSError if the file ends before."""
        while buffer:
            count = self._take(buffer[:CHUNK])
            buffer = buffer[count:]

    def read(self, count: int) -> bytes:
        """The next bytes; OSError if the file ends before. Whoever asks has seen to it that they are not too many."""
        data = bytearray(count)
        self.fill(memoryview(data))
        return bytes(data)

    def skip(self, count: int) -> None:
        """Read and digest bytes that nobody wants."""
        while count > 0:
            count -= self._take(memoryview(bytearray(min(CHUNK, count))))

    def content(self) -> Content:
        """What the file holds, all of it."""
        self.skip(self.size - self.done)
        return Content(self.done, self._digest.hex())

    def _take(self, buffer: memoryview) -> int:
        try:
            count = os.readv(self._file, [buffer])
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error
        if not count:
            raise OSError(0, f"it ends after {self.done} bytes", str(self._path))
        self._digest.update(buffer[:count])
        self.done += count
        return count


@contextmanager
def reading(path: Path) -> Iterator[Reading]:
    """A regular file; OSError for anything else: for a link, or a pipe on which one would wait for ever."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # without waiting for a pipe's other end
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(0, "is no regular file", str(path))
        with Sha256Stream() as digest:
            yield Reading(path, file, digest)
    finally:
        os.close(file)


def read_file(path: Path, limit: int) -> tuple[bytes, Content]:
    """All of a regular file, and what it holds; OSError if it has more than `limit` bytes."""
    with reading(path) as file:
        if file.size > limit:
            raise OSError(0, f"it has {file.size} bytes, and more than {limit} are not read", str(path))
        return file.read(file.size), file.content()


def content(path: Path) -> Content:
    """Size and SHA-256 of a regular file."""
    with reading(path) as file:
        return file.content()


def size(path: Path) -> int:
    """The size of a file in bytes, a link's own if it is one."""
    return os.lstat(path).st_size


def free(folder: Path) -> int:
    """How many bytes can still be written there."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


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
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_folder(path: Path) -> bool:
    """Whether there is a folder of this name, and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def _chunks(parts: Iterable[memoryview]) -> Iterator[memoryview]:
    """The same bytes in pieces that are worth a system call: small parts together, large ones cut."""
    gathered = bytearray()
    for part in parts:
        if len(part) < SMALL:
            gathered += part
        if gathered and (len(part) >= SMALL or len(gathered) >= SMALL):
            yield memoryview(bytes(gathered))
            gathered.clear()
        if len(part) >= SMALL:
            yield from (part[start : start + CHUNK] for start in range(0, len(part), CHUNK))
    if gathered:
        yield memoryview(bytes(gathered))


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
