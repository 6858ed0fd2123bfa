"""The formats of files."""

import gzip
from pathlib import Path

import pyarrow
import pyarrow.parquet

from drawloom.components.data.sources.documents import iterate_texts
from drawloom.components.data.sources.files import find_files
from drawloom.components.data.sources.formats import split_files_into_parts


def test_names_tell_the_format(tmp_path: Path) -> None:
    """Files in all formats side by side are read in order, by their formats."""
    (tmp_path / "a.jsonl").write_text('{"body": "lines"}\n')
    (tmp_path / "b.txt").write_text("a text")
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"body": "compressed"}\n{"body": "lines"}\n'))
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a", "table"]}), tmp_path / "d.parquet")
    parts = split_files_into_parts(find_files([f"{tmp_path}/*"]), "body")
    assert list(iterate_texts(parts)) == ["lines", "a text", "compressed", "lines", "a", "table"]
