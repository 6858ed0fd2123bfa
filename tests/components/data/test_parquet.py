"""A corpus of Parquet and Arrow files."""

from pathlib import Path

import pyarrow
from pyarrow import ipc

from drawloom.components.data.parquet import Parquet
from support.stores import write_table


def test_rows_are_documents_of_one_split(tmp_path: Path) -> None:
    """All files' rows come in order, in the splits of their texts."""
    write_table(tmp_path / "a.parquet", "a", 30)
    table = pyarrow.table({"text": [f"b {number}" for number in range(10)]})
    with ipc.new_file(str(tmp_path / "b.arrow"), table.schema) as out:
        out.write_table(table)
    corpus = Parquet(paths=[f"{tmp_path}/*"], validation_fraction=0.3)
    train, validation = (list(corpus.documents(split)) for split in ("train", "validation"))
    whole = [*(f"a {number}" for number in range(30)), *(f"b {number}" for number in range(10))]
    assert sorted(train + validation) == sorted(whole) and 4 < len(validation) < 20
    assert train == [text for text in whole if text in set(train)]
