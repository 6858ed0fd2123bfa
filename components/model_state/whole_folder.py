"""Folders that are whole or absent, whenever the power fails."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drawloom.graph import UserError


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """
    A new folder to write into, which becomes `target` at the end of the block, or vanishes with an exception.

    It stands beside the target, so that renaming is one step of the file system; all files are on disk before that.
    What an earlier, killed attempt left is removed. UserError if the target holds something already.
    """
    refuse_if_taken(target)
    target = target.absolute()
    aside = target.parent / f".{target.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        flush_tree(aside)
        os.rename(aside, target)
        flush(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


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
