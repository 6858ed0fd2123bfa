"""Formats of corpus files: JSON lines, and tables in Parquet and Arrow, as by Hugging Face's `datasets`."""

import codecs
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import IO, Any

import attrs

from drawloom import UserError
from drawloom.components.data.sources.documents import PART_BYTES, Document, Part
from drawloom.components.data.sources.files import (
    PYARROW,
    File,
    find_files,
    group_text_files,
    import_optional_package,
    open_file,
)


@attrs.frozen
class JsonLinesPart:
    """Lines in a file from byte `begin` to before `end`; all lines in a compressed file."""

    file: File
    field: str
    begin: int
    end: int

    @property
    def byte_count(self) -> int:
        """Bytes that these lines take in the file."""
        return min(self.end, self.file.size) - self.begin

    def documents(self) -> Iterator[Document]:
        """Yield the texts in non-blank lines. Raises UserError with a bad line's position."""
        with open_file(self.file) as stream:
            for offset, line in self._iterate_lines(stream):
                text = self._read_text(line, offset)
                yield Document(text, self.file.path, offset)

    def _iterate_lines(self, stream: IO[bytes]) -> Iterator[tuple[int, bytes]]:
        """Yield the non-blank lines with their offsets."""
        offset = self.begin
        if offset:
            stream.seek(offset - 1)
            offset += len(stream.readline()) - 1
        while offset < self.end and (line := stream.readline()):
            if line.strip():
                yield offset, line
            offset += len(line)

    def _read_text(self, line: bytes, offset: int) -> str:
        """Return a line's text. Raises UserError with the line number."""
        try:
            return get_text_field(_parse_line(line), self.field)
        except ValueError as error:
            raise UserError(f"{self.file.path}:{self._find_line_number(offset)}{error}") from error

    def _find_line_number(self, offset: int) -> int:
        """Return the line number at an offset, from 1."""
        with open_file(self.file) as stream:
            number = 1
            while offset > 0 and (block := stream.read(min(2**20, offset))):
                number += block.count(b"\n")
                offset -= len(block)
        return number


def split_json_lines_files(files: Sequence[File], field: str) -> list[JsonLinesPart]:
    """Divide files into line ranges; compressed files are not divided."""
    parts = []
    for file in files:
        step = max(file.size, 1) if file.is_compressed else PART_BYTES
        for begin in range(0, max(file.size, 1), step):
            end = 2**63 if file.is_compressed else min(begin + step, file.size)
            parts.append(JsonLinesPart(file, field, begin, end))
    return parts


def get_text_field(value: object, field: str) -> str:
    """Return the text in an object's field. Raises ValueError with the reason if there is none."""
    if not isinstance(value, dict):
        raise ValueError(
            f': a line must be an object and not {_get_json_type_name(value)}; write a line like {{"{field}": "..."}}'
        )
    if field not in value:
        fields = ", ".join(value) or "none"
        raise ValueError(f': the object has no field "{field}", only {fields}; set `field` to one of them')
    text = value[field]
    if not isinstance(text, str):
        raise ValueError(f': field "{field}" is {_get_json_type_name(text)}; a document must be a string')
    _check_surrogates(text, f'field "{field}"')
    return text


def _check_surrogates(text: str, name: str) -> None:
    """Raise ValueError for half a surrogate pair, which has no tokens."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        character = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f": {name} contains {character}, half of a surrogate pair; remove it") from error


def _parse_line(line: bytes) -> object:
    """Parse a JSON line. Raises ValueError with the reason."""
    try:
        return json.loads(line.decode("utf-8"))
    except json.JSONDecodeError as error:
        if line.startswith(codecs.BOM_UTF8):
            raise ValueError(": begins with a byte order mark; save the file as UTF-8 without one") from error
        raise ValueError(f":{error.colno}: not JSON ({error.msg}); repair or remove the line") from error
    # RecursionError: deep nesting; ValueError: invalid UTF-8, and integers of too many digits
    except (ValueError, RecursionError) as error:
        raise ValueError(f": can't be read ({error}); repair or remove the line") from error


def _get_json_type_name(value: object) -> str:
    """Return the JSON name for a value's type."""
    if value is None:
        return "null"
    names: dict[type, str] = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


BATCH = 1000  # rows in memory at a time
MAGIC = b"ARROW1"  # starts an Arrow file, but not a stream


@attrs.frozen
class ParquetPart:
    """Consecutive row groups in a Parquet file; `row` is the first row's number, `byte_count` is its size."""

    file: File
    field: str
    groups: tuple[int, ...]
    row: int
    byte_count: int

    def documents(self) -> Iterator[Document]:
        """Yield every row's text. Raises UserError with the first row that is not text."""
        with open_file(self.file) as stream, _convert_errors(self.file):
            batches = _open_parquet(stream).iter_batches(BATCH, row_groups=list(self.groups), columns=[self.field])
            yield from _read_documents(batches, self.file, self.field, self.row)


@attrs.frozen
class ArrowPart:
    """An Arrow file or stream."""

    file: File
    field: str

    @property
    def byte_count(self) -> int:
        """File size in bytes."""
        return self.file.size

    def documents(self) -> Iterator[Document]:
        """Yield every row's text. Raises UserError with the first row that is not text."""
        with open_file(self.file) as stream, _convert_errors(self.file):
            names, batches = _open_arrow_columns_and_batches(stream)
            _check_has_text_column(names, self.field, self.file)
            yield from _read_documents((batch.select([self.field]) for batch in batches), self.file, self.field, 0)


def split_table_files(files: Sequence[File], field: str) -> list[Part]:
    """Divide Parquet files into row groups; an Arrow file is one part."""
    return [
        part
        for file in files
        for part in ([ArrowPart(file, field)] if file.suffix == ".arrow" else _split_parquet_file(file, field))
    ]


def _split_parquet_file(file: File, field: str) -> Iterator[ParquetPart]:
    """Divide a Parquet file into consecutive row groups, up to PART_BYTES per part."""
    with open_file(file) as stream, _convert_errors(file):
        metadata = _open_parquet(stream).metadata
        _check_has_text_column(metadata.schema.to_arrow_schema().names, field, file)
        sizes = [
            (metadata.row_group(number).num_rows, metadata.row_group(number).total_byte_size)
            for number in range(metadata.num_row_groups)
        ]
    groups: list[int] = []
    row = size = 0
    for number, (_, group_size) in enumerate(sizes):
        if groups and size + group_size > PART_BYTES:
            yield ParquetPart(file, field, tuple(groups), row, size)
            row += sum(sizes[group][0] for group in groups)
            groups, size = [], 0
        groups.append(number)
        size += group_size
    if groups:
        yield ParquetPart(file, field, tuple(groups), row, size)


def read_table_rows(file: File) -> Iterator[dict[str, Any]]:
    """Yield rows from a Parquet or Arrow file, as values by column."""
    with open_file(file) as stream, _convert_errors(file):
        batches = (
            _open_arrow_columns_and_batches(stream)[1]
            if file.suffix == ".arrow"
            else _open_parquet(stream).iter_batches(BATCH)
        )
        for batch in batches:
            yield from batch.to_pylist()


def _open_arrow_columns_and_batches(stream: Any) -> tuple[Sequence[str], Iterator[Any]]:
    """Return an Arrow file's or stream's column names and batches."""
    import_optional_package("pyarrow", PYARROW)
    from pyarrow import ipc

    is_file = stream.read(len(MAGIC)) == MAGIC
    stream.seek(0)
    reader = ipc.open_file(stream) if is_file else ipc.open_stream(stream)
    batches = (reader.get_batch(number) for number in range(reader.num_record_batches)) if is_file else iter(reader)
    return reader.schema.names, batches


def _open_parquet(stream: Any) -> Any:
    """Open a Parquet file. Raises UserError if pyarrow is missing."""
    import_optional_package("pyarrow", PYARROW)
    from pyarrow.parquet import ParquetFile

    return ParquetFile(stream)


def _read_documents(batches: Any, file: File, field: str, first_row: int) -> Iterator[Document]:
    """Yield the first column's texts as documents; `first_row` is the first row's number."""
    for batch in batches:
        for text in batch.column(0).to_pylist():
            if not isinstance(text, str):
                kind = "null" if text is None else type(text).__name__
                raise UserError(f'{file.path}: row {first_row}: field "{field}" is {kind}; a document must be a string')
            yield Document(text, file.path, first_row)
            first_row += 1


def _check_has_text_column(names: Sequence[str], field: str, file: File) -> None:
    """Raise UserError if a table lacks the text column."""
    if field not in names:
        raise UserError(
            f'{file.path}: the table has no column "{field}", only {", ".join(names)}; set `field` to one of them'
        )


@contextmanager
def _convert_errors(file: File) -> Iterator[None]:
    """Turn pyarrow's errors into UserErrors with the file's path."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith("pyarrow"):
            raise
        raise UserError(f"{file.path}: can't be read ({error}); repair the file, or leave it out") from error


FORMATS = {".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow"}


def split_files_into_parts(files: Sequence[File], field: str) -> list[Part]:
    """Divide files into parts, in order; a file with an unknown extension is a text."""
    parts: list[Part] = []
    for kind, group in groupby(files, key=lambda file: FORMATS.get(file.suffix, "text")):
        members = list(group)
        if kind == "text":
            parts += group_text_files(members)
        else:
            parts += (split_json_lines_files if kind == "json" else split_table_files)(members, field)
    return parts


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
                yield Line(position, _parse_json_object(line, position))


def _parse_json_object(line: bytes, position: str) -> dict[str, Any]:
    """Parse a line's JSON object. Raises UserError with the position."""
    try:
        row = _parse_line(line)
        if rb"\ud" in line.lower():
            _check_surrogates(json.dumps(row, ensure_ascii=False), "a text")
    except ValueError as error:
        raise UserError(f"{position}{error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{position}: a line must be an object and not {_get_json_type_name(row)}")
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
