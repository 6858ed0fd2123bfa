"""Text files as documents, found by globs, with an order and a split that do not depend on the file system."""

import glob
import os
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path

import attrs

from drawloom.components.ports.data import Split
from drawloom.graph import UserError


def split_of(key: bytes, validation_fraction: float) -> Split:
    """The split of a document, by a hash of its key; `validation_fraction` is 0 to 1."""
    fraction = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") / 2**64
    return "validation" if fraction < validation_fraction else "train"


@attrs.frozen
class TextFile:
    """A file, and its name relative to the corpus, which determines its position and its split."""

    name: str
    path: Path


def find(patterns: Iterable[str]) -> list[TextFile]:
    """
    The files of globs (`**` crosses folders), in the order of the globs and by name in each; duplicates are dropped.

    A name is the path below the glob's folder before the first wildcard. Raises UserError for a glob without a file.
    """
    found: dict[str, TextFile] = {}
    for pattern in patterns:
        for file in _matches(pattern):
            # by real path: links may reach one file twice
            found.setdefault(os.path.realpath(file.path), file)
    return list(found.values())


def documents(
    files: Iterable[TextFile], split: Split, validation_fraction: float, replace: bool = False
) -> Iterator[str]:
    """The texts of one split's files. Invalid UTF-8 is replaced by U+FFFD, or raises UserError."""
    for file in files:
        if split_of(os.fsencode(file.name), validation_fraction) == split:
            yield decode(read(file.path), file.path, replace)


def read(path: Path) -> bytes:
    """A file's content. Raises UserError if it can't be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> UserError:
    """The error for a file that the operating system can't read."""
    return UserError(f"{path}: can't be read ({error.strerror}); repair the file or leave it out of `paths`")


def decode(content: bytes, path: Path, replace: bool) -> str:
    """A file's content as text, with unchanged line ends."""
    try:
        return content.decode("utf-8", "replace" if replace else "strict")
    except UnicodeDecodeError as error:
        byte = f"byte {error.start} (0x{content[error.start]:02x})"
        hint = 'convert the file, leave it out of `paths`, or write invalid_bytes = "replace"'
        raise UserError(f"{path}: {byte} is not UTF-8; {hint}") from error


def _matches(pattern: str) -> list[TextFile]:
    folder = _folder(pattern)
    paths = [Path(match) for match in glob.iglob(pattern, recursive=True)]
    files = [TextFile(path.relative_to(folder).as_posix(), path) for path in paths if path.is_file()]
    if not files:
        raise UserError(f'paths: no file matches "{pattern}" (relative to {Path.cwd()}); write a glob that matches one')
    return sorted(files, key=lambda file: file.name)


def _folder(pattern: str) -> Path:
    """The folder of a glob before its first wildcard; for a plain path, its parent folder."""
    parts = Path(pattern).parts
    plain = list(takewhile(lambda part: not glob.has_magic(part), parts))
    return Path(*(plain if len(plain) < len(parts) else plain[:-1]))
