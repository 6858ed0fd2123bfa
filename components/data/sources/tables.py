"""Tables with a text column: Parquet, and Arrow files or streams, as Hugging Face's `datasets` writes them."""

from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from drawloom.components.data.sources.documents import PART_BYTES, Document, Part
from drawloom.components.data.sources.files import PYARROW, File, import_optional_package, open_file
from drawloom.graph import UserError

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


def split_parquet_files(files: Sequence[File], field: str) -> list[ParquetPart]:
    """Divide Parquet files into consecutive row groups."""
    return [part for file in files for part in _split_parquet_file(file, field)]


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


class _convert_errors:
    """Context that turns pyarrow errors into UserErrors with the file's path."""

    def __init__(self, file: File) -> None:
        self._file = file

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and type(error).__module__.startswith("pyarrow"):
            raise UserError(f"{self._file.path}: can't be read ({error}); repair the file, or leave it out") from error
