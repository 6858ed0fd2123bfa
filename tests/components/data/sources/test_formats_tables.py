"""Tables of Parquet and Arrow."""

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from pyarrow import ipc

from drawloom.components.data.sources import formats
from drawloom.components.data.sources.documents import Part, iterate_texts
from drawloom.components.data.sources.files import find_files
from drawloom.components.data.sources.formats import ArrowPart, read_table_rows, split_table_files
from drawloom.graph import UserError

TEXTS = [f"text {number}" for number in range(2500)]


def table(texts: Any = TEXTS) -> Any:
    return pyarrow.table({"id": list(range(len(texts))), "body": texts})


def write(path: Path, kind: str, table: Any) -> list[Part]:
    """Return a file of this kind, and its parts."""
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=700)
        return [*split_table_files(find_files([str(path)]), "body")]
    writer = ipc.new_file if kind == "file" else ipc.new_stream
    with writer(str(path), table.schema) as out:
        out.write_table(table, max_chunksize=700)
    return [ArrowPart(file, "body") for file in find_files([str(path)])]


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_each_row_is_a_document(tmp_path: Path, kind: str) -> None:
    """The column's texts come in order, with their row numbers."""
    parts = write(tmp_path / "a", kind, table())
    documents = [document for part in parts for document in part.documents()]
    assert [document.text for document in documents] == TEXTS
    assert [document.offset for document in documents] == list(range(len(TEXTS)))


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_rows_have_all_columns(tmp_path: Path, kind: str) -> None:
    """An object for each row, in order."""
    path = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow")
    write(path, kind, table())
    [file] = find_files([str(path)])
    assert [*read_table_rows(file)] == [{"id": number, "body": text} for number, text in enumerate(TEXTS)]


def test_row_groups_are_divided_into_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large file is in several parts, which read their own row groups."""
    monkeypatch.setattr(formats, "PART_BYTES", 1)
    parts = write(tmp_path / "a", "parquet", table())
    assert len(parts) == 4
    assert [document.offset for document in parts[1].documents()] == list(range(700, 1400))
    assert list(iterate_texts(parts)) == TEXTS


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_a_value_that_is_not_text_is_named(tmp_path: Path, kind: str) -> None:
    """A null, another column and a damaged file are errors naming the file, and the row if there is one."""
    with pytest.raises(UserError, match='a: row 1: field "body" is null'):
        list(iterate_texts(write(tmp_path / "a", kind, table(["one", None]))))
    with pytest.raises(UserError, match=r'b: the table has no column "body", only id, other'):
        list(iterate_texts(write(tmp_path / "b", kind, table(["one"]).rename_columns(["id", "other"]))))
    path = tmp_path / "a"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="a: can't be read"):
        list(
            iterate_texts(
                split_table_files(find_files([str(path)]), "body")
                if kind == "parquet"
                else [ArrowPart(find_files([str(path)])[0], "body")]
            )
        )
