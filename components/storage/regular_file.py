"""Files from strangers, opened so that what lies in a folder is read, and nothing else is touched or waited for."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from drawloom.graph import UserError


@attrs.frozen
class RegularFile:
    """An open file, and what tells it from another of its name: device, number, size and time of the last change."""

    path: Path
    descriptor: int
    identity: tuple[int, int, int, int]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.identity[2]

    def read(self, start: int, length: int) -> bytes:
        """Bytes from a place on; UserError if the file ends before."""
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), start)
        return bytes(buffer)

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill a buffer with the bytes from a place on; UserError if the file ends before."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self.descriptor, [buffer[done:]], start + done)
            if not count:
                raise UserError(f"{self.path} ends after {start + done} bytes, while it is read; copy it again")
            done += count


@contextmanager
def open_regular_file(path: Path, remedy: str = "copy the folder again") -> Iterator[RegularFile]:
    """
    A file, open to be read.

    UserError, with what to do, for what is not there (its cause is the OSError then), for links, and for all that is
    no regular file.
    """
    try:
        _refuse_others(path, os.lstat(path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); {remedy}") from error
    except ValueError as error:
        raise UserError(f"{str(path)!r} can't be read ({error}); write another path") from error
    try:
        found = os.fstat(descriptor)
        _refuse_others(path, found)
        yield RegularFile(path, descriptor, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))
    finally:
        os.close(descriptor)


def _refuse_others(path: Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise UserError(f"{path} is a symbolic link, which may lead anywhere; copy the folder with `cp -rL`")
    if not stat.S_ISREG(found.st_mode):
        raise UserError(f"{path} is no regular file, and reading it could wait for ever; put a plain file there")
