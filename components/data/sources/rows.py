"""Whole rows, such as conversations: JSON lines, and rows in Parquet and Arrow tables."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from drawloom.components.data.sources.files import File, find_files, open_file
from drawloom.components.data.sources.tables import read_table_rows
from drawloom.graph import UserError

TABLES = (".parquet", ".arrow")


@attrs.frozen
class Line:
    """Line in a file, or row in a table; `position` is its file and number, for messages."""

    position: str
    row: dict[str, Any]


def read_json_lines_or_table_rows(paths: Sequence[str]) -> Iterator[Line]:
    """
    Yield non-blank lines and table rows in the globs' files. Raises UserError for a line that is not an object.
    """
    for file in find_files(paths):
        yield from _read_table_lines(file) if file.suffix in TABLES else _read_json_lines(file)


def _read_json_lines(file: File) -> Iterator[Line]:
    """Yield a file's non-blank lines."""
    with open_file(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                position = f"{file.path}:{number}"
                yield Line(position, _parse_object(line, position))


def _parse_object(line: bytes, position: str) -> dict[str, Any]:
    """Parse a line's JSON object. Raises UserError with the position."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{position}: {error}; write one JSON object per line") from error
    if not isinstance(row, dict):
        raise UserError(f"{position}: a line must be a JSON object, not {type(row).__name__}")
    return row


def _read_table_lines(file: File) -> Iterator[Line]:
    """Yield a table's rows."""
    for number, row in enumerate(read_table_rows(file)):
        yield Line(f"{file.path}: row {number}", _drop_null_values(row))


def _drop_null_values(value: Any) -> Any:
    """
    Remove keys with null from objects, except `content`.

    All objects in a table column have the same keys: a key used by one row in its messages or tools is null in all
    other rows, and a template would render it.
    """
    if isinstance(value, dict):
        kept = {key: entry for key, entry in value.items() if entry is not None or key == "content"}
        return {key: _drop_null_values(entry) for key, entry in kept.items()}
    return [_drop_null_values(entry) for entry in value] if isinstance(value, list) else value
