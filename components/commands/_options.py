"""Files that commands write: checks before the work, and errors."""

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drawloom import UserError
from drawloom.components.storage.durable_files import replace_file
from drawloom.graph.cli.json_text import dump_json_line


def check_writable_file(path: Path) -> str | None:
    """Return why no file can be written at a path, and what to write."""
    if path.is_dir():
        return f"{path} is a folder; write the name of a file"
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # permission bits do not apply to root, nor to /proc
            return None
    except OSError as error:
        reason = f"no file can be written in {path.parent} ({error.strerror})"
        return f"{reason}; write a file in a folder that can be written"


def check_new_file(path: Path) -> str | None:
    """Return why no new file or folder can be written at a path, and what to write."""
    reason = check_writable_file(path)
    return f"{path} exists; give the name of a new file" if path.is_file() else reason


@contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Turn an OSError, such as a full disk, into a UserError that names `--to`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror}; write another file with --to", 2) from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file at once. Raises UserError that names `--to`."""
    with convert_write_errors(path):
        replace_file(path, content)


def write_json_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file with a row per line, as `write_file` does."""
    write_file(path, "".join(f"{dump_json_line(row)}\n" for row in rows).encode())
