"""Temporary folders beside their targets, renamed when complete."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

import attrs

from drawloom import UserError
from drawloom.components.storage.durable_files import flush_to_disk, remove_file_or_folder, rename_durably


@attrs.frozen
class TempFolder:
    """Temporary folder beside its target."""

    target: Path
    folder: Path

    def commit(self) -> None:
        """Flush the folder, and rename it to the target."""
        _flush_tree_to_disk(self.folder)
        rename_durably(self.folder, self.target)

    def discard(self) -> None:
        """Remove the temporary folder, unless it was committed."""
        with suppress(OSError):
            remove_file_or_folder(self.folder)


def remove_folder_atomically(target: Path) -> None:
    """Rename a folder, so it disappears at once, and remove it under its temporary name."""
    target = target.absolute()
    if target.is_dir():
        # after a kill, `create_temp_folder` removes the hidden folder
        hidden = target.with_name(f".{target.name}.partial-{secrets.token_hex(4)}")
        rename_durably(target, hidden)
        with suppress(OSError):
            remove_file_or_folder(hidden)


def create_temp_folder(target: Path) -> TempFolder:
    """
    Create a temporary folder on the target's file system, so the rename is atomic.

    Removes earlier attempts' temporary folders: if two attempts run concurrently, the first one fails, and their files
    never mix. Raises UserError if the target exists and is not an empty folder.
    """
    _check_missing_or_empty(target)
    target = target.absolute()
    prefix = f".{target.name}.partial-"
    target.parent.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(target.parent):
        if name.startswith(prefix):
            with suppress(OSError):
                remove_file_or_folder(target.parent / name)
    folder = target.parent / f"{prefix}{secrets.token_hex(4)}"
    folder.mkdir()
    return TempFolder(target, folder)


def _check_missing_or_empty(target: Path) -> None:
    """Raise UserError unless the target is missing or an empty folder."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists() or target.is_symlink():
        raise UserError(f"{target} exists already; write the name of a new folder, or remove this one first")


def _flush_tree_to_disk(folder: Path) -> None:
    """Flush every file and folder below a folder, and the folder itself."""
    for parent, _, files in os.walk(folder):
        for path in (*(Path(parent, file) for file in files), Path(parent)):
            flush_to_disk(path)
