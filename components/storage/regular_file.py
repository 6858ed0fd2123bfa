"""
Opens regular files: links are not followed, and pipes and devices are refused before they block.

Of a file whose content is known by the digests of its blocks, a part is read with only the blocks in which it is.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

from drawloom.components.storage.sha256_stream import BLOCK, Content, count_blocks, hash_block
from drawloom.graph import UserError

CHUNK = 2**22  # bytes that are read or written at a time


@attrs.define(eq=False)
class RegularFile:
    """An open regular file; `identity` is its device, inode, size and time of modification."""

    path: Path
    descriptor: int
    identity: tuple[int, int, int, int]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.identity[2]

    def read(self, offset: int, length: int) -> bytes:
        """`length` bytes from an offset; OSError if the file ends before. The caller bounds the length."""
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes from an offset on; OSError if the file ends before."""
        while buffer:
            try:
                count = os.preadv(self.descriptor, [buffer[:CHUNK]], offset)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            if not count:
                raise OSError(0, f"it ends after {offset} bytes", str(self.path))
            buffer, offset = buffer[count:], offset + count


@contextmanager
def regular_file(path: Path) -> Iterator[RegularFile]:
    """A file, open for reading; OSError if it is missing, a link, or not a regular file."""
    descriptor = open_descriptor(path, os.O_RDONLY)
    try:
        found = os.fstat(descriptor)
        identity = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
        yield RegularFile(path, descriptor, identity)
    finally:
        os.close(descriptor)


@contextmanager
def open_regular_file(path: Path, remedy: str = "copy the folder again") -> Iterator[RegularFile]:
    """An untrusted file; UserError with the remedy (and the OSError as its cause) if it can't be read."""
    try:
        with regular_file(path) as file:
            yield file
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); {remedy}") from error


def open_descriptor(path: Path, flags: int) -> int:
    """
    The descriptor of a regular file, opened with the flags of open(2); OSError if it is a link or not a regular file.

    A run folder that a stranger sent may hold links to files outside of it, so a run opens the files that it keeps
    under a fixed name here.
    """
    try:
        with suppress(FileNotFoundError):
            _check_kind(path, os.lstat(path))  # before it is opened: opening alone has effects on some devices
        # O_NONBLOCK: opening a pipe would wait for a writer. It has no effect on regular files.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    try:
        _check_kind(path, os.fstat(descriptor))  # again: another file may have taken the name meanwhile
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_to_append(path: Path) -> int:
    """The descriptor of a file to read and append to, created if it is missing; UserError if that can't be done."""
    try:
        return open_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise UserError(f"{path} can't be written ({error.strerror}); remove it, or use another run name") from error


def make_folder(path: Path) -> Path:
    """A folder in a run folder, created if it is missing; UserError if a link or a file has its name."""
    try:
        path.mkdir(exist_ok=True)
        if path.is_symlink():
            raise OSError(errno.ENOTDIR, "it is a symbolic link, which may lead anywhere", str(path))
    except OSError as error:
        text = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(f"{path} can't be written to ({text}); remove it, or use another run name") from error
    return path


def read_file(path: Path, limit: int) -> bytes:
    """All bytes of a regular file; OSError if it is larger than `limit` bytes."""
    with regular_file(path) as file:
        if file.size > limit:
            raise OSError(0, f"it has {file.size} bytes, and more than {limit} are not read", str(path))
        return file.read(0, file.size)


def hash_file(path: Path) -> Content:
    """Size and SHA-256 of a regular file."""
    with regular_file(path) as file:
        blocks = (
            file.read(number * BLOCK, min(BLOCK, file.size - number * BLOCK))
            for number in range(count_blocks(file.size))
        )
        return Content(file.size, (hash_block(block) for block in blocks))


def _check_kind(path: Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise OSError(0, "it is a symbolic link, which may lead anywhere; `cp -rL` copies what it leads to", str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(0, "it is not a regular file", str(path))


HASHERS = 4  # threads that hash the blocks of one read


class OtherContent(Exception):
    """A file differs from what was written; the message says how, and does not name the file."""


@attrs.define(eq=False)
class VerifiedFile(RegularFile):
    """
    An open file of which every byte that is read is verified first; `verified` are the blocks that were.

    Reads raise OtherContent. The bytes in use are those that were hashed, and what is read in order is read once.
    """

    expected: Content = attrs.field(kw_only=True)
    verified: set[int] = attrs.field(kw_only=True, factory=set)
    _last: tuple[int, bytes] = (-1, b"")  # of the blocks that were needed in part, the last one

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes from an offset on."""
        end = offset + len(buffer)
        if end == offset:
            return
        with ThreadPoolExecutor(HASHERS, "sha256") as pool:  # starts a thread when it is given work
            checks = []
            for number in range(offset // BLOCK, -(-end // BLOCK)):
                start, stop = self._span(number)
                low, high = max(start, offset), min(stop, end)
                part = buffer[low - offset : high - offset]
                if (low, high) != (start, stop) or number == self._last[0]:
                    part[:] = self._block(number)[low - start : high - start]
                else:
                    super().read_into(part, start)
                    checks.append(pool.submit(self._verify, number, part))
        for check in checks:
            check.result()

    def verify(self, blocks: Iterable[int]) -> None:
        """Read and verify these blocks."""
        for number in blocks:
            start, stop = self._span(number)
            self._verify(number, self._plain(start, stop))

    def _block(self, number: int) -> bytes:
        if number != self._last[0]:
            start, stop = self._span(number)
            block = self._plain(start, stop)
            self._verify(number, block)
            self._last = number, block
        return self._last[1]

    def _plain(self, start: int, stop: int) -> bytes:
        buffer = bytearray(stop - start)
        super().read_into(memoryview(buffer), start)
        return bytes(buffer)

    def _span(self, number: int) -> tuple[int, int]:
        return number * BLOCK, min((number + 1) * BLOCK, self.size)

    def _verify(self, number: int, block: bytes | memoryview) -> None:
        if number >= len(self.expected.blocks) or hash_block(block) != self.expected.blocks[number]:
            start, stop = self._span(number)
            raise OtherContent(f"has a checksum mismatch in bytes {start} to {stop}")
        self.verified.add(number)


@contextmanager
def verified_file(path: Path, expected: Content) -> Iterator[VerifiedFile]:
    """A file of this content, open for reading. OSError as of `regular_file`; OtherContent for one of another size."""
    with regular_file(path) as file:
        if file.size != expected.size:
            raise OtherContent(f"has {file.size} bytes instead of {expected.size}")
        yield VerifiedFile(file.path, file.descriptor, file.identity, expected=expected)
