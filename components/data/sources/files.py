"""
Files of a corpus: found by globs, in an order that does not depend on the file system, and opened.

A path with a protocol, such as `s3://bucket/corpus/*.jsonl`, is fsspec's. Files whose names end in `.gz` or `.zst` are
decompressed.
"""

import gzip
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from glob import has_magic, iglob
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

import attrs

from drawloom.graph import UserError

COMPRESSED = (".gz", ".zst")
FSSPEC = "install what reads it: pip install 'drawloom[fsspec]', and the package of its protocol, such as s3fs"
PYARROW = "pip install 'drawloom[arrow]'"


@attrs.frozen
class File:
    """
    A file of a corpus.

    `name`, below the glob's first wildcard, determines its position and its split; `version` changes with its content.
    """

    name: str
    path: str
    size: int
    version: str

    @property
    def suffix(self) -> str:
        """The end of its name, without that of a compression: `.jsonl` for `a.jsonl.gz`."""
        return Path(Path(self.name).stem if self.compressed else self.name).suffix

    @property
    def compressed(self) -> bool:
        """Whether it has to be decompressed, and so is read from its beginning."""
        return self.name.endswith(COMPRESSED)


def find(patterns: Iterable[str]) -> list[File]:
    """
    The files of globs (`**` crosses folders), in the order of the globs and by name in each; duplicates are dropped.

    A name is the path below the glob's folder before the first wildcard. Raises UserError for a glob without a file.
    """
    found: dict[str, File] = {}
    for pattern in patterns:
        remote = "://" in pattern
        for file in _remote(pattern) if remote else _local(pattern):
            # by real path: links may reach one file twice
            found.setdefault(file.path if remote else os.path.realpath(file.path), file)
    return list(found.values())


def local(name: str, path: Path) -> File:
    """A file of this machine; its version is its times of change and modification."""
    try:
        status = path.stat()
    except OSError as error:
        raise unreadable(str(path), error) from error
    return File(name, str(path), status.st_size, f"{status.st_mtime_ns} {status.st_ctime_ns}")


def groups(files: Sequence[File], most: int) -> Iterator[tuple[File, ...]]:
    """Consecutive files of `most` bytes together; a larger one is a group of its own."""
    group: list[File] = []
    for file in files:
        if group and sum(each.size for each in group) + file.size > most:
            yield tuple(group)
            group = []
        group.append(file)
    if group:
        yield tuple(group)


@contextmanager
def opened(file: File) -> Iterator[IO[bytes]]:
    """A file's decompressed bytes. Errors of reading are UserErrors that name it."""
    try:
        with _raw(file.path) as stream, _decompressed(file.name, stream) as content:
            yield content
    except (OSError, EOFError) as error:
        raise unreadable(file.path, error) from error


def unreadable(path: str, error: Exception) -> UserError:
    """The error for a file that can't be read, because of the operating system or of its compression."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return UserError(f"{path}: can't be read ({reason}); repair the file or leave it out of `paths`")


def package(name: str, hint: str) -> Any:
    """An optional package. Raises UserError with what to install if it is missing."""
    try:
        return __import__(name)
    except ImportError as error:
        raise UserError(f"the package `{name}` is missing; {hint}") from error


def _raw(path: str) -> IO[bytes]:
    if "://" not in path:
        return open(path, "rb")
    stream: IO[bytes] = package("fsspec", FSSPEC).open(path, "rb").open()
    return stream


@contextmanager
def _decompressed(name: str, stream: IO[bytes]) -> Iterator[IO[bytes]]:
    if name.endswith(".gz"):
        with gzip.open(stream) as content:
            yield content  # type: ignore[misc]
    elif name.endswith(".zst"):
        package("pyarrow", PYARROW)
        import pyarrow

        # the package zstandard reads a cut-off file without an error
        with pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), "zstd") as content:
            yield pyarrow.BufferedInputStream(content, 2**16)
    else:
        yield stream


def _local(pattern: str) -> list[File]:
    if os.path.isdir(pattern):
        pattern = f"{pattern.rstrip('/')}/**/*"
    folder = _folder(pattern)
    paths = [Path(match) for match in iglob(pattern, recursive=True)]
    files = [local(path.relative_to(folder).as_posix(), path) for path in paths if path.is_file()]
    if not files:
        raise UserError(f'paths: no file matches "{pattern}" (relative to {Path.cwd()}); write a glob that matches one')
    return sorted(files, key=lambda file: file.name)


def _remote(pattern: str) -> list[File]:
    fsspec = package("fsspec", FSSPEC)
    try:
        system, glob = fsspec.core.url_to_fs(pattern)
        found = [details for details in system.glob(glob, detail=True).values() if details["type"] == "file"]
    except Exception as error:  # each protocol has its own
        raise UserError(f'paths: "{pattern}" can\'t be listed ({error}); write a glob that can, or {FSSPEC}') from error
    if not found:
        raise UserError(f'paths: no file matches "{pattern}"; write a glob that matches one')
    folder = _folder(glob)
    files = [
        File(
            Path(details["name"]).relative_to(folder).as_posix(),
            system.unstrip_protocol(details["name"]),
            details["size"],
            system.ukey(details["name"]),
        )
        for details in found
    ]
    return sorted(files, key=lambda file: file.name)


def _folder(pattern: str) -> Path:
    """The folder of a glob before its first wildcard; for a plain path, its parent folder."""
    parts = Path(pattern).parts
    plain = list(takewhile(lambda part: not has_magic(part), parts))
    return Path(*(plain if len(plain) < len(parts) else plain[:-1]))
