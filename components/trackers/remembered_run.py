"""The identifier of a run in another program, stored in the run folder so that a resumed run continues it."""

from pathlib import Path

from drawloom.components.storage.durable_files import read_file, replace_file

MAX_LENGTH = 200


def read_stored_run_id(folder: Path, tracking_program: str) -> str:
    """Return the identifier that `store_run_id` stored, or "". Raises OSError if the file is a link or too large."""
    path = _identifier_path(folder, tracking_program)
    return read_file(path, MAX_LENGTH).decode("utf-8").strip() if path.exists() or path.is_symlink() else ""


def store_run_id(folder: Path, tracking_program: str, run_id: str) -> None:
    """Store the identifier of the run folder's run in a program, on disk."""
    replace_file(_identifier_path(folder, tracking_program), f"{run_id}\n".encode())


def _identifier_path(folder: Path, program: str) -> Path:
    """Return the path of the file with a program's run identifier."""
    return folder / f"{program}_run.txt"
