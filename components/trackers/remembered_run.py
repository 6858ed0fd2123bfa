"""The identifier of a run in another program, kept in the run folder: a run that starts again continues it."""

from pathlib import Path

from drawloom.components.storage.durable_files import replace_file
from drawloom.components.storage.regular_file import read_file

MAX_LENGTH = 200


def remembered_run(folder: Path, program: str) -> str:
    """Return the identifier that `remember_run` kept, or "" without one. Raises OSError for a link or a large file."""
    path = _path(folder, program)
    return read_file(path, MAX_LENGTH).decode("utf-8").strip() if path.exists() or path.is_symlink() else ""


def remember_run(folder: Path, program: str, run: str) -> None:
    """Keep the identifier of this run folder's run in a program, on the disk."""
    replace_file(_path(folder, program), f"{run}\n".encode())


def _path(folder: Path, program: str) -> Path:
    return folder / f"{program}_run.txt"
