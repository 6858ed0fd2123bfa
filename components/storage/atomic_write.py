"""Folders that are whole or absent, whenever the power fails."""

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs

from drawloom.graph import UserError


@attrs.frozen
class Aside:
    """A folder beside the target, in which everything is written before it takes the target's name."""

    target: Path
    folder: Path

    def commit(self) -> None:
        """Make it the target, with all files on disk before that."""
        flush_tree(self.folder)
        os.rename(self.folder, self.target)
        flush(self.target.parent)

    def discard(self) -> None:
        """Remove it, if it is still there."""
        shutil.rmtree(self.folder, ignore_errors=True)


def begin(target: Path) -> Aside:
    """
    A new folder to write into, so near to the target that renaming is one step of the file system.

    What other attempts left is removed, so that of two at once the first fails: files are never mixed. UserError if
    the target holds something already.
    """
    refuse_if_taken(target)
    target = target.absolute()
    start = f".{target.name}.partial-"
    target.parent.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(target.parent):
        if name.startswith(start):
            shutil.rmtree(target.parent / name, ignore_errors=True)
    folder = target.parent / f"{start}{secrets.token_hex(4)}"
    folder.mkdir()
    return Aside(target, folder)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder to write into, which becomes `target` at the end of the block, or vanishes with an exception."""
    aside = begin(target)
    try:
        yield aside.folder
        aside.commit()
    finally:
        aside.discard()


def refuse_if_taken(target: Path) -> None:
    """UserError unless the target is absent or an empty folder."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} is there already; write the name of a folder that is not, or remove it first")


def flush_tree(folder: Path) -> None:
    """Return when every file and folder below is on disk."""
    for parent, _, files in os.walk(folder):
        for file in files:
            flush(Path(parent, file))
        flush(Path(parent))


def flush(path: Path) -> None:
    """Return when a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
