"""Text files as documents, found by globs, with an order and a split that do not depend on the file system."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path
from typing import get_args

import attrs

from drawloom.components.ports.corpus import Split
from drawloom.graph import UserError


def split_of(key: bytes, validation_fraction: float) -> Split:
    """The split of a document, by a hash of its key; `validation_fraction` is 0 to 1."""
    fraction = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") / 2**64
    return "validation" if fraction < validation_fraction else "train"


def split_texts(documents: Iterable[tuple[bytes, Callable[[], str]]], split: Split, fraction: float) -> Iterator[str]:
    """
    The texts of one split; a document is given by the key that determines its split and a function that reads it.

    A corpus so small that a split would be empty is divided within documents instead: the last part of each, `fraction`
    of its characters, is in the validation split. With a fraction of 0 or 1, one split is empty. `documents` is
    iterated twice.
    """
    if 0 < fraction < 1 and not _has_both_splits(documents, fraction):
        yield from (_part(read(), split, fraction) for _, read in documents)
    else:
        yield from (read() for key, read in documents if split_of(key, fraction) == split)


def _has_both_splits(documents: Iterable[tuple[bytes, Callable[[], str]]], fraction: float) -> bool:
    """Whether each split has a text that is not empty; in a large corpus the first few documents show it."""
    missing = set(get_args(Split))
    for key, read in documents:
        if (found := split_of(key, fraction)) in missing and read():
            missing.discard(found)
        if not missing:
            return True
    return False


def _part(text: str, split: Split, fraction: float) -> str:
    cut = int(len(text) * (1 - fraction))
    return text[:cut] if split == "train" else text[cut:]


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
    """The texts of one split, by the names of files. Invalid UTF-8 is replaced by U+FFFD, or raises UserError."""
    named = [(os.fsencode(file.name), partial(_text, file.path, replace)) for file in files]
    return split_texts(named, split, validation_fraction)


def _text(path: Path, replace: bool) -> str:
    return decode(read(path), path, replace)


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
