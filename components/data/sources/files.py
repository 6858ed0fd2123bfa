"""
Corpus files: globs, a file order independent from the file system, and decompression.

fsspec reads paths with a protocol, such as `s3://bucket/corpus/*.jsonl`. Files with the suffixes `.gz` and `.zst` are
decompressed. Text files are a corpus; other corpora in files derive from the base class.
"""

import gzip
import io
import os
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from glob import has_magic, iglob
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

import attrs

from drawloom import UserError
from drawloom.components.data.sources.documents import (
    PART_BYTES,
    DividedCorpus,
    Document,
    Part,
    file_globs,
    iterate_texts,
    validation_fraction,
)
from drawloom.graph import component_base_class

COMPRESSED = (".gz", ".zst")
FSSPEC = "install its reader: pip install 'drawloom[fsspec]', and the protocol's package, such as s3fs"
PYARROW = "pip install 'drawloom[arrow]'"


@attrs.frozen
class File:
    """
    Corpus file.

    `name`, the path below the glob's first wildcard, determines its position; `version` changes with
    its content.
    """

    name: str
    path: str
    size: int
    version: str

    @property
    def suffix(self) -> str:
        """File extension, without a compression's extension: `.jsonl` for `a.jsonl.gz`."""
        return Path(Path(self.name).stem if self.is_compressed else self.name).suffix

    @property
    def is_compressed(self) -> bool:
        """Whether the file is compressed, and can only be read from its beginning."""
        return self.name.endswith(COMPRESSED)


def find_files(patterns: Iterable[str]) -> list[File]:
    """
    Return the files for globs (`**` crosses folders), ordered by glob and then by name, without duplicates.

    A name is the path below the folder before the first wildcard. Raises UserError for a glob without a file.
    """
    files: dict[str, File] = {}
    for pattern in patterns:
        is_remote = "://" in pattern
        for file in _find_remote_files(pattern) if is_remote else _find_local_files(pattern):
            # keyed by real path, because two links may lead to one file
            files.setdefault(file.path if is_remote else os.path.realpath(file.path), file)
    return list(files.values())


def stat_local_file(name: str, path: Path) -> File:
    """Return a local file; its version is its modification and change times."""
    try:
        status = path.stat()
    except OSError as error:
        raise make_unreadable_file_error(str(path), error) from error
    return File(name, str(path), status.st_size, f"{status.st_mtime_ns} {status.st_ctime_ns}")


def group_files(files: Sequence[File], max_bytes: int) -> Iterator[tuple[File, ...]]:
    """Group consecutive files up to `max_bytes` bytes together; a larger file is its own group."""
    group: list[File] = []
    for file in files:
        if group and sum(member.size for member in group) + file.size > max_bytes:
            yield tuple(group)
            group = []
        group.append(file)
    if group:
        yield tuple(group)


@contextmanager
def open_file(file: File) -> Iterator[IO[bytes]]:
    """Open a file for its decompressed bytes. Reading errors become UserErrors with its path."""
    try:
        with _open_without_decompression(file.path) as stream, _decompress(file.name, stream) as content:
            yield content
    except (OSError, EOFError) as error:
        raise make_unreadable_file_error(file.path, error) from error


def make_unreadable_file_error(path: str, error: Exception) -> UserError:
    """Return the error for a file that can't be read or decompressed."""
    reason = (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
    return UserError(f"{path}: can't be read ({reason}); repair the file or leave it out of `paths`")


def import_optional_package(name: str, hint: str) -> Any:
    """Import an optional package. Raises UserError with an installation hint if it is missing."""
    try:
        return __import__(name)
    except ImportError as error:
        raise UserError(f"the package `{name}` is missing; {hint}") from error


def _open_without_decompression(path: str) -> IO[bytes]:
    """Open a local file, or a URL through fsspec, without decompression."""
    if "://" not in path:
        return open(path, "rb")
    return import_optional_package("fsspec", FSSPEC).open(path, "rb").open()  # type: ignore[no-any-return]


@contextmanager
def _decompress(name: str, stream: IO[bytes]) -> Iterator[IO[bytes]]:
    """Decompress a stream, if the name has a compressed file's suffix."""
    if name.endswith(".gz"):
        with gzip.open(stream) as content:
            yield content  # type: ignore[misc]
    elif name.endswith(".zst"):
        import_optional_package("pyarrow", PYARROW)
        import pyarrow

        # the package zstandard reads a cut-off file without an error
        with pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), "zstd") as content:
            yield io.BufferedReader(content, 2**16)  # pyarrow's own reads no lines
    else:
        yield stream


def _find_local_files(pattern: str) -> list[File]:
    """Return a glob's or a folder's files, sorted by name. Raises UserError if there are none."""
    if os.path.isdir(pattern):
        pattern = f"{pattern.rstrip('/')}/**/*"
    folder = _get_folder_before_wildcard(pattern)
    paths = [Path(match) for match in iglob(pattern, recursive=True)]
    files = [stat_local_file(path.relative_to(folder).as_posix(), path) for path in paths if path.is_file()]
    if not files:
        where = "only a shell expands ~" if pattern.startswith("~") else f"relative to {Path.cwd()}"
        raise UserError(f'paths: no file matches "{pattern}" ({where}); write a glob that matches one')
    return sorted(files, key=lambda file: file.name)


def _find_remote_files(pattern: str) -> list[File]:
    """Return a URL glob's files through fsspec, sorted by name. Raises UserError if there are none."""
    fsspec = import_optional_package("fsspec", FSSPEC)
    try:
        system, glob = fsspec.core.url_to_fs(pattern)
        matches = [details for details in system.glob(glob, detail=True).values() if details["type"] == "file"]
    except Exception as error:  # each protocol raises its own exceptions
        raise UserError(f'paths: "{pattern}" can\'t be listed ({error}); write another glob, or {FSSPEC}') from error
    if not matches:
        raise UserError(f'paths: no file matches "{pattern}"; write a glob that matches one')
    folder = _get_folder_before_wildcard(glob)
    files = [
        File(
            Path(details["name"]).relative_to(folder).as_posix(),
            system.unstrip_protocol(details["name"]),
            details["size"],
            system.ukey(details["name"]),
        )
        for details in matches
    ]
    return sorted(files, key=lambda file: file.name)


def _get_folder_before_wildcard(pattern: str) -> Path:
    """Return a glob's folder before its first wildcard; for a plain path, its parent folder."""
    parts = Path(pattern).parts
    plain = list(takewhile(lambda part: not has_magic(part), parts))
    return Path(*(plain if len(plain) < len(parts) else plain[:-1]))


@component_base_class
class FileCorpus(DividedCorpus):
    """Base for texts in files that globs select, ordered by file."""

    paths: list[str] = file_globs("files")
    validation_fraction: float = validation_fraction("documents")

    @abstractmethod
    def divide_files(self, files: Sequence[File]) -> Sequence[Part]:
        """Divide files into independently readable parts."""

    def check_before_open(self) -> None:
        """Read the first document. Raises UserError for a glob without a file, or a malformed document."""
        next(iterate_texts(self.divide_files(find_files(self.paths)[:1])), None)

    def divide(self) -> Sequence[Part]:
        return self.divide_files(find_files(self.paths))


@attrs.frozen
class TextPart:
    """A few text files; each is a document. Invalid UTF-8 raises UserError, or is replaced by U+FFFD if `replace`."""

    files: tuple[File, ...]
    replace: bool = False

    @property
    def byte_count(self) -> int:
        """Total file size in bytes."""
        return sum(file.size for file in self.files)

    def documents(self) -> Iterator[Document]:
        """Yield the files' texts, with unchanged line ends."""
        for file in self.files:
            with open_file(file) as stream:
                content = stream.read()
            yield Document(_decode_utf8(content, file.path, self.replace), file.path, 0)


def group_text_files(files: Sequence[File], replace_invalid: bool = False) -> list[TextPart]:
    """Group files into parts."""
    return [TextPart(group, replace_invalid) for group in group_files(files, PART_BYTES)]


def _decode_utf8(content: bytes, path: str, replace_invalid: bool) -> str:
    """Decode UTF-8. Raises UserError for an invalid byte, unless `replace_invalid`."""
    try:
        return content.decode("utf-8", "replace" if replace_invalid else "strict")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} (0x{content[error.start]:02x})"
        hint = 'convert the file, leave it out of `paths`, or write invalid_bytes = "replace"'
        raise UserError(f"{path}: {byte} is not UTF-8; {hint}") from error
