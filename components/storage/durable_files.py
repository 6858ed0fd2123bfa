"""
Files and folders that survive a power cut: flushed to disk, and replaced atomically.

New content is written under a temporary name, flushed to disk, and renamed. No other module renames files.
"""

import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import attrs

from drawloom.components.storage.regular_file import CHUNK
from drawloom.components.storage.sha256_stream import BLOCK, FileDigest, Sha256Stream


@attrs.define(eq=False)
class FileWriter:
    """
    Open file with writes at any offset; `name` is for errors.

    A `sha256` stream hashes the bytes written in order from the file's start. They must not change until the file is
    complete, because a thread hashes them later.
    """

    name: str
    descriptor: int
    sha256: Sha256Stream | None = None

    def write_at(self, data: memoryview, offset: int) -> None:
        """Write all bytes at an offset."""
        for start in range(0, len(data), CHUNK):
            piece, position = data[start : start + CHUNK], offset + start
            if self.sha256 is not None and position == self.sha256.size:
                self.sha256.update(piece)
            while piece:  # pwrite may write fewer bytes
                try:
                    count = os.pwrite(self.descriptor, piece, position)
                except OSError as error:
                    raise _add_file_name(error, self.name) from error
                piece, position = piece[count:], position + count

    def finish_digest(self) -> FileDigest:
        """Return size and SHA-256 for the bytes written in order from the start."""
        if self.sha256 is None:
            raise ValueError(f"{self.name} was opened without hashing, so it has no checksum")
        return self.sha256.finish()


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
    return file.finish_digest()


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
