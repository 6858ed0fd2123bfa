"""Parts of documents in memory, and token stores of them."""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from drawloom.components.data.bytes import Bytes
from drawloom.components.data.sources.documents import Document
from drawloom.components.data.store.build import build
from drawloom.components.data.store.store import Store
from drawloom.graph import UserError


@attrs.frozen
class Texts:
    """A part of these texts."""

    texts: tuple[str, ...]
    name: str = "memory"

    @property
    def size(self) -> int:
        return sum(map(len, self.texts))

    def documents(self) -> Iterator[Document]:
        for number, text in enumerate(self.texts):
            yield Document(text, self.name, number, text.encode("utf-8", "replace"))


def store_of(folder: Path, parts: Sequence[Sequence[str]]) -> Store:
    """A store of bytes, with a shard for each part."""
    return build(folder, [Texts(tuple(texts), f"part {number}") for number, texts in enumerate(parts)], Bytes())


def content(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def damage(path: Path, place: int = -1) -> None:
    """Change one byte of a file."""
    held = bytearray(path.read_bytes())
    held[place] ^= 1
    path.write_bytes(held)


PARTS = [Texts(tuple(f"text {number} {shard} " * 50 for number in range(40)), f"part {shard}") for shard in range(6)]


@attrs.frozen
class Failing:
    """A part that fails at a document, until a file is gone; its repr is that of the part."""

    part: Texts
    flag: Path

    @property
    def size(self) -> int:
        return self.part.size

    def documents(self) -> Iterator[Document]:
        for document in self.part.documents():
            if document.offset == 30 and self.flag.exists():
                raise UserError(f"{document.source}: broken")
            yield document

    def __repr__(self) -> str:
        return repr(self.part)


@attrs.frozen
class Slow:
    """A part whose documents take some time."""

    part: Texts

    @property
    def size(self) -> int:
        return self.part.size

    def documents(self) -> Iterator[Document]:
        for document in self.part.documents():
            time.sleep(0.002)
            yield document

    def __repr__(self) -> str:
        return repr(self.part)


def make_slowly(folder: Path) -> None:
    build(folder, [Slow(part) for part in PARTS], Bytes(), workers=2)


@attrs.frozen
class Deadly:
    """A part whose reading kills its process."""

    size: int = 1

    def documents(self) -> Iterator[Document]:
        os.kill(os.getpid(), signal.SIGKILL)
        yield from ()
