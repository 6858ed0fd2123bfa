"""
Documents in memory, token stores built from them, and files of other programs with documents.

Processes that write stores import this module, so it imports neither torch nor pyarrow, which take more than a second.
"""

import json
import os
import signal
import struct
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.sources.documents import Document
from drawloom.components.data.store.build import build_store
from drawloom.components.data.store.store import Store
from drawloom.graph import UserError


@attrs.frozen
class Texts:
    """A part with these texts."""

    texts: tuple[str, ...]
    name: str = "memory"

    @property
    def byte_count(self) -> int:
        return sum(map(len, self.texts))

    def documents(self) -> Iterator[Document]:
        for number, text in enumerate(self.texts):
            yield Document(text, self.name, number)


def store_of(folder: Path, parts: Sequence[Sequence[str]]) -> Store:
    """Build a store of bytes, with a shard for each part."""
    return build_store(folder, [Texts(tuple(texts), f"part {number}") for number, texts in enumerate(parts)], Bytes())


def content(folder: Path) -> dict[str, bytes]:
    """Return all files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damage(path: Path, position: int = -1) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


PARTS = [Texts(tuple(f"text {number} {shard} " * 50 for number in range(40)), f"part {shard}") for shard in range(6)]


@attrs.frozen(repr=False)
class Around:
    """A part with an action before each document; its repr is the inner part's."""

    part: Texts

    @property
    def byte_count(self) -> int:
        return self.part.byte_count

    def documents(self) -> Iterator[Document]:
        for document in self.part.documents():
            self.before(document)
            yield document

    def before(self, document: Document) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        return repr(self.part)


@attrs.frozen(repr=False)
class Failing(Around):
    """A part that fails at a document, until a file is gone."""

    flag: Path

    def before(self, document: Document) -> None:
        if document.offset == 30 and self.flag.exists():
            raise UserError(f"{document.source}: broken")


class Slow(Around):
    """A part whose documents take some time."""

    def before(self, document: Document) -> None:
        time.sleep(0.01)


@attrs.frozen(repr=False)
class Blocked(Around):
    """A part whose second document waits until a file is gone."""

    flag: Path

    def before(self, document: Document) -> None:
        while document.offset == 1 and self.flag.exists():
            time.sleep(0.01)


def make_blocked(folder: Path, flag: Path) -> None:
    build_store(folder, [Blocked(part, flag) for part in PARTS], Bytes(), workers=2)


def make_slowly(folder: Path) -> None:
    build_store(folder, [Slow(part) for part in PARTS], Bytes(), workers=2)


@attrs.frozen
class Deadly:
    """A part that kills the process reading it."""

    byte_count: int = 1

    def documents(self) -> Iterator[Document]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield from ()


def write_table(path: Path, text: str, rows: int) -> None:
    """Write a Parquet file with columns `text` and `other`."""
    import pyarrow.parquet

    pyarrow.parquet.write_table(_table(text, rows), path)


def write_dataset(folder: Path, text: str) -> None:
    """Write data sets `train`, in two files, and `test`, as `save_to_disk` lays them out."""
    import pyarrow.ipc

    for split, sizes in (("train", (12, 8)), ("test", (5,))):
        (folder / split).mkdir(parents=True)
        names = [f"data-{number:05}-of-{len(sizes):05}.arrow" for number in range(len(sizes))]
        for name, rows in zip(names, sizes, strict=True):
            table = _table(f"{split} {rows} {text}", rows)
            with pyarrow.ipc.new_stream(str(folder / split / name), table.schema) as out:
                out.write_table(table)
        (folder / split / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))


def _table(text: str, rows: int) -> Any:
    import pyarrow

    columns = {"text": [f"{text} {number}" for number in range(rows)], "other": [str(number) for number in range(rows)]}
    return pyarrow.table(columns)


def write_megatron(path: Path, documents: Sequence[Sequence[int]]) -> None:
    """Write `path`.bin and `path`.idx, with a sequence for each document."""
    sizes = [len(document) for document in documents]
    offsets = [2 * sum(sizes[:number]) for number in range(len(sizes))]
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1)
    columns = (np.array(sizes, "<i4"), np.array(offsets, "<i8"), np.arange(len(sizes) + 1, dtype="<i8"))
    path.with_name(f"{path.name}.idx").write_bytes(header + b"".join(column.tobytes() for column in columns))
    tokens = [token for document in documents for token in document]
    path.with_name(f"{path.name}.bin").write_bytes(np.array(tokens, "<u2").tobytes())
