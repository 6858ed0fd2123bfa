"""
Files and folders that survive a power cut: flushed to disk, and replaced atomically.

New content is written under a temporary name, flushed to disk, and renamed. No other module renames files.

Files are read without following links, and pipes and devices are refused before they block.

A thread computes digests (SHA-256) while a file is written, per block instead of per file, so a part can be read and
verified alone.
"""

import errno
import hashlib
import os
import queue
import shutil
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import attrs

from drawloom import UserError

BLOCK = 2**22  # bytes; part of the format of checkpoints
LARGE = 2**18  # bytes; hashing a smaller piece takes less time than starting a thread
AHEAD = 4  # queued pieces; more would only use memory, because hashing is about as fast as the disk


@attrs.frozen
class FileDigest:
    """Identity of a file's content: its size in bytes, and the hexadecimal SHA-256 per block."""

    size: int
    blocks: tuple[str, ...] = attrs.field(converter=tuple[str, ...])

    @property
    def digest(self) -> str:
        """Digest for the whole file: the SHA-256 over its block digests."""
        return hashlib.sha256(b"".join(map(bytes.fromhex, self.blocks))).hexdigest()


def count_hash_blocks(size: int) -> int:
    """Return the block count for a file with `size` bytes; an empty file has one empty block."""
    return max(1, -(-size // BLOCK))


def hash_block(block: bytes | memoryview) -> str:
    """Return a block's hexadecimal SHA-256."""
    return hashlib.sha256(block).hexdigest()


@attrs.define(eq=False)
class Sha256Stream:
    """
    Incremental hash; a thread starts at the first large piece, to hash while the disk is busy.

    A piece must not change before `finish`, which also ends the thread. `size` is the byte count so far.
    """

    _block: int = BLOCK  # bytes
    size: int = 0
    _blocks: list[str] = attrs.field(factory=list)
    _hash: Any = attrs.field(factory=hashlib.sha256)  # of the last block
    _hashed: int = 0  # bytes in it
    _pieces: queue.Queue[memoryview | None] = attrs.field(factory=lambda: queue.Queue(AHEAD))
    _thread: threading.Thread | None = None

    def update(self, piece: memoryview) -> None:
        """Append a piece; the thread may hash it later."""
        self.size += len(piece)
        if self._thread is None and len(piece) >= LARGE:
            self._thread = threading.Thread(target=self._hash_queue, name="sha256", daemon=True)
            self._thread.start()
        if self._thread is None:
            self._hash_piece(piece)
        else:
            self._pieces.put(piece)

    def finish(self) -> FileDigest:
        """Return the size and digests of all pieces."""
        if self._thread is not None:
            self._pieces.put(None)
            self._thread.join()
            self._thread = None
        if self._hashed or not self._blocks:
            self._end_block()
        return FileDigest(self.size, self._blocks)

    def _hash_queue(self) -> None:
        """Hash the queued pieces, in the thread, until None arrives."""
        for piece in iter(self._pieces.get, None):
            self._hash_piece(piece)

    def _hash_piece(self, piece: memoryview) -> None:
        """Hash a piece, and end every full block."""
        while piece:
            part, piece = piece[: self._block - self._hashed], piece[self._block - self._hashed :]
            self._hash.update(part)
            self._hashed += len(part)
            if self._hashed == self._block:
                self._end_block()

    def _end_block(self) -> None:
        """Store the block's digest, and begin the next block."""
        self._blocks.append(self._hash.hexdigest())
        self._hash, self._hashed = hashlib.sha256(), 0


CHUNK = 2**22  # bytes that are read or written at a time


@attrs.define(eq=False)
class RegularFile:
    """Open regular file; `identity` is its device, inode, size and time of modification."""

    path: Path
    descriptor: int
    identity: tuple[int, int, int, int]

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self.identity[2]

    def read(self, offset: int, length: int) -> bytes:
        """
        Return `length` bytes from an offset. Raises OSError at the file's end. The caller must bound
        `length`.
        """
        buffer = bytearray(length)
        self.read_into(memoryview(buffer), offset)
        return bytes(buffer)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes from an offset. Raises OSError if the file ends before."""
        while buffer:
            try:
                count = os.preadv(self.descriptor, [buffer[:CHUNK]], offset)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
            if not count:
                raise OSError(0, f"it ends after {offset} bytes", str(self.path))
            buffer, offset = buffer[count:], offset + count


@contextmanager
def open_regular_file(path: Path) -> Iterator[RegularFile]:
    """Open a file for reading. Raises OSError if it is missing, a link, or not a regular file."""
    descriptor = open_regular_descriptor(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        yield RegularFile(path, descriptor, identity)
    finally:
        os.close(descriptor)


@contextmanager
def open_untrusted_file(path: Path, remedy: str = "copy the folder again") -> Iterator[RegularFile]:
    """
    Open an untrusted file for reading. Raises UserError with the reason and the remedy if opening or reading fails.
    """
    try:
        with open_regular_file(path) as file:
            yield file
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}); {remedy}") from error


def open_regular_descriptor(path: Path, flags: int) -> int:
    """
    Open a regular file with flags of open(2), and return its descriptor. Raises OSError if it is a link or not a
    regular file.

    A stranger's run folder may contain links to outside files, so a run opens all files with fixed names by this
    function.
    """
    try:
        with suppress(FileNotFoundError):
            _check_is_regular(path, os.lstat(path))  # before opening, which has effects on some devices
        # O_NONBLOCK, because opening a pipe would wait for its writer; it has no effect on regular files
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), str(path)) from error
    try:
        _check_is_regular(path, os.fstat(descriptor))  # again, because another file may have replaced it
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_to_append(path: Path) -> int:
    """Open a file for reading and appending, and create it if it is missing. Raises UserError if that fails."""
    try:
        return open_regular_descriptor(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    except OSError as error:
        raise UserError(f"{path} can't be written ({error.strerror}); remove it, or use another run name") from error


def create_folder_unless_link(path: Path) -> Path:
    """Create a folder in a run folder, if it is missing. Raises UserError if a link or a file has its name."""
    try:
        path.mkdir(exist_ok=True)
        if path.is_symlink():
            raise OSError(errno.ENOTDIR, "it is a symbolic link, which may lead anywhere", str(path))
    except OSError as error:
        text = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise UserError(
            f"{path} can't be opened for writing ({text}); remove this file, or use another run name"
        ) from error
    return path


def read_file(path: Path, limit: int) -> bytes:
    """Return a regular file's content. Raises OSError for more than `limit` bytes."""
    with open_regular_file(path) as file:
        if file.size > limit:
            raise OSError(0, f"it has {file.size} bytes, and more than {limit} are not read", str(path))
        return file.read(0, file.size)


def _check_is_regular(path: Path, status: os.stat_result) -> None:
    """Raise OSError for a link, a folder, a pipe or a device."""
    if stat.S_ISLNK(status.st_mode):
        raise OSError(0, "it is a symbolic link, which may lead anywhere; `cp -rL` copies what it leads to", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(0, "it is not a regular file", str(path))


def does_file_begin_with(path: Path, beginning: bytes) -> bool:
    """Return whether a regular file begins with these bytes; False for a missing file, a pipe or a link."""
    try:
        with open_regular_file(path) as file:
            return file.read(0, min(file.size, len(beginning))) == beginning
    except OSError:
        return False


@attrs.define(eq=False)
class FileWriter:
    """
    Open file with writes at any offset; `name` is for errors.

    `sha256` hashes the bytes written in order from the file's start. They must not change until the file is complete,
    because a thread hashes them later.
    """

    name: str
    descriptor: int
    sha256: Sha256Stream

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write all bytes at an offset."""
        for start in range(0, len(data), CHUNK):
            piece, position = data[start : start + CHUNK], offset + start
            if position == self.sha256.size:
                self.sha256.update(piece)
            while piece:  # pwrite may write fewer bytes
                try:
                    count = os.pwrite(self.descriptor, piece, position)
                except OSError as error:
                    raise _add_file_name(error, self.name) from error
                piece, position = piece[count:], position + count


@contextmanager
def create_new_durable_file(path: Path, block: int = BLOCK) -> Iterator[FileWriter]:
    """Create a file with a hash per block, and flush it when the context ends. Raises OSError if it exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    sha256 = Sha256Stream(block)
    try:
        yield FileWriter(str(path), descriptor, sha256)
        _fsync_once(descriptor, path)
    finally:
        sha256.finish()
        os.close(descriptor)


def create_file_with_content(path: Path, data: bytes) -> FileDigest:
    """Create a file with these bytes, and flush it to disk. Raises OSError if it exists."""
    with create_new_durable_file(path) as file:
        file.write_at(memoryview(data), 0)
    return file.sha256.finish()


def flush_to_disk(path: Path) -> None:
    """Flush a file or a folder. A new or renamed file survives a power cut only if its folder is flushed too."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _fsync_once(descriptor, path)
    finally:
        os.close(descriptor)


def count_free_bytes(folder: Path) -> int:
    """Return the free bytes on a folder's file system, for an unprivileged process."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def remove_file_or_folder(path: Path) -> None:
    """Remove a folder with its content, if it exists; for anything else, such as a link or a pipe, only the name."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    # rmtree would open a pipe, and wait for its writer
    if stat.S_ISDIR(mode):
        shutil.rmtree(path)
    else:
        path.unlink()


def list_folder(folder: Path) -> list[str]:
    """Return the sorted names in a folder; empty if it is missing."""
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def rename_durably(old: Path, new: Path) -> None:
    """Rename a file or folder atomically within its folder, and flush the new name."""
    os.rename(old, new)
    flush_to_disk(new.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Replace a file's content atomically. Two processes must not replace the same file at once."""
    temporary = path.with_name(f".{path.name}.tmp")
    remove_file_or_folder(temporary)  # left by a killed process, or anything else of that name
    try:
        create_file_with_content(temporary, data)
        rename_durably(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        error.filename = str(path)  # the name that a reader of the error knows
        raise


def _fsync_once(descriptor: int, path: Path) -> None:
    """
    Call fsync once: after a failed call the kernel may have dropped the data, and a retry would succeed.

    https://lwn.net/Articles/752063/
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise _add_file_name(error, str(path)) from error


def _add_file_name(error: OSError, name: str) -> OSError:
    """Add the file name to a system call's error."""
    return OSError(error.errno, error.strerror, name)
