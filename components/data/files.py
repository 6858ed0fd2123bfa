"""Files of text as documents: found by globs, in an order and a split that no file system decides."""

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
    """The split of a document, by a hash of its key, if a share `held_out` (0 to 1) of all keys is held out."""
    fraction = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") / 2**64
    return "validation" if fraction < validation_fraction else "train"


@attrs.frozen
class TextFile:
    """A file, and the name that decides on its place and its split: the same wherever the corpus lies."""

    name: str
    path: Path


def find(patterns: Iterable[str]) -> list[TextFile]:
    """
    The files of globs (`**` crosses folders), glob after glob, by name in each; a file found twice counts once.

    A name is the path below the glob's folder before the first wildcard. A glob without a file is a UserError.
    """
    found: dict[str, TextFile] = {}
    for pattern in patterns:
        for file in _matches(pattern):
            found.setdefault(os.path.realpath(file.path), file)
    return list(found.values())


def documents(
    files: Iterable[TextFile], split: Split, validation_fraction: float, replace: bool = False
) -> Iterator[str]:
    """The texts of the files of one split. Bytes that are no UTF-8 are replaced by U+FFFD, or a UserError."""
    for file in files:
        if split_of(os.fsencode(file.name), validation_fraction) == split:
            yield decode(read(file.path), file.path, replace)


def read(path: Path) -> bytes:
    """A file's content, or a UserError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> UserError:
    """What to say of a file that the operating system does not let us read."""
    return UserError(f"{path}: can't be read ({error.strerror}); mend the file or leave it out of `paths`")


def decode(content: bytes, path: Path, replace: bool) -> str:
    """A file's content as text, its line ends as they are."""
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
        raise UserError(f'paths: no file matches "{pattern}" (looked from {Path.cwd()}); write a glob that one matches')
    return sorted(files, key=lambda file: file.name)


def _folder(pattern: str) -> Path:
    """The folder of a glob before its first wildcard; of a plain path, the folder that it lies in."""
    parts = Path(pattern).parts
    plain = list(takewhile(lambda part: not glob.has_magic(part), parts))
    return Path(*(plain if len(plain) < len(parts) else plain[:-1]))
