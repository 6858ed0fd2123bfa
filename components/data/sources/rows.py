"""Whole rows of files, such as conversations: the objects of JSON lines, the rows of Parquet and Arrow."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from drawloom.components.data.sources.files import File, find, opened
from drawloom.components.data.sources.tables import table_rows
from drawloom.graph import UserError

TABLES = (".parquet", ".arrow")


@attrs.frozen
class Line:
    """
    A line of a file, or a row of a table.

    `place` is its file and number, for messages; its split follows from the bytes of `key`.
    """

    place: str
    key: bytes
    row: dict[str, Any]


def lines_of(paths: Sequence[str]) -> Iterator[Line]:
    """The lines that are not blank, and the rows, of the files of globs. UserError for a line that is no object."""
    for file in find(paths):
        yield from _table(file) if file.suffix in TABLES else _json_lines(file)


def _json_lines(file: File) -> Iterator[Line]:
    with opened(file) as stream:
        for number, line in enumerate(stream, 1):
            if line.strip():
                place = f"{file.path}:{number}"
                # Without its end, which the last line of a file may lack: a line's split is the same anywhere.
                yield Line(place, line.strip(), _parse(line, place))


def _parse(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place}: {error}; write an object of JSON in each line") from error
    if not isinstance(row, dict):
        raise UserError(f"{place}: a line must be an object, and not {type(row).__name__}")
    return row


def _table(file: File) -> Iterator[Line]:
    for number, row in enumerate(table_rows(file)):
        cleaned = _without_nulls(row)
        key = json.dumps(cleaned, sort_keys=True, default=str).encode()
        yield Line(f"{file.path}: row {number}", key, cleaned)


def _without_nulls(value: Any) -> Any:
    """
    The same without the keys of objects that are null, but for `content`.

    In a table all objects of a column have the same keys: one that some row's messages or tools have is null in all
    others, and a template would write it.
    """
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if each is not None or key == "content"}
        return {key: _without_nulls(each) for key, each in kept.items()}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
