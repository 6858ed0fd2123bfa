"""
Atomic writes: a file or folder has all of its new content or none, also after a power cut.

New content is written under a temporary name, flushed to disk, and renamed. No other module renames files.
"""

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

import attrs

from drawloom.components.storage import durable_files
from drawloom.graph import UserError


def rename(old: Path, new: Path) -> None:
    """Rename a file or folder within its folder, which is atomic, and flush the new name."""
    os.rename(old, new)
    durable_files.sync(new.parent)


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of a file atomically. Two processes must not replace the same file at once."""
    temporary = temporary_name(path)
    temporary.unlink(missing_ok=True)  # a killed process may have left it
    try:
        durable_files.write_file(temporary, data)
        rename(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def temporary_name(path: Path) -> Path:
    """The temporary path of the new content of a file: hidden, in the same folder, so that the rename is atomic."""
    return path.with_name(f".{path.name}.tmp")


@attrs.frozen
class TempFolder:
    """A temporary folder beside the target; `commit` renames it to the target."""

    target: Path
    folder: Path

    def commit(self) -> None:
        """Flush everything and rename it to the target."""
        durable_files.sync_tree(self.folder)
        rename(self.folder, self.target)

    def discard(self) -> None:
        """Remove the temporary folder, if it was not committed."""
        shutil.rmtree(self.folder, ignore_errors=True)


def remove_folder(target: Path) -> None:
    """Remove a folder, if it exists: it disappears at once, and its files are removed under a temporary name."""
    target = target.absolute()
    if target.is_dir():
        hidden = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")  # removed by `begin` after a kill
        rename(target, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def begin(target: Path) -> TempFolder:
    """
    A new folder to write into, on the file system of the target, so that the rename is atomic.

    Temporary folders of earlier attempts are removed, so that of two concurrent attempts the first fails, and files of
    two attempts are never mixed. Raises UserError if the target exists and is not an empty folder.
    """
    _refuse_if_taken(target)
    target = target.absolute()
    prefix = f".{target.name}.partial-"
    target.parent.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(target.parent):
        if name.startswith(prefix):
            shutil.rmtree(target.parent / name, ignore_errors=True)
    folder = target.parent / f"{prefix}{secrets.token_hex(4)}"
    folder.mkdir()
    return TempFolder(target, folder)


def _refuse_if_taken(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already; write the name of a new folder, or remove this one first")
