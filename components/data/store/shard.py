"""
A shard of a token store: one file of ids, one of columns by document, perhaps one of weights, and one of digests.

`NNNNN.tokens` has the ids of all documents end to end, little-endian, 2 bytes each up to 65,536 ids and else 4.
`NNNNN.weights`, if there are any, has a float32 for each id. `NNNNN.documents` has four columns, one after another,
with a number for each document: where it ends in the shard (uint64, tokens), a hash of its ids and weights (uint64),
its offset in its source (uint64), and the index of its source (uint32). `NNNNN.json` is written last: it has the
counts, the names of the sources, and the SHA-256 of the others; a shard without it is not complete.
"""

import json
from array import array
from contextlib import ExitStack
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from drawloom.components.storage.durable_files import FileWriter, new_file, replace_file
from drawloom.components.storage.regular_file import hash_file
from drawloom.graph import UserError

U8, U4 = np.dtype("<u8"), np.dtype("<u4")
COLUMNS = (("ends", U8), ("keys", U8), ("offsets", U8), ("sources", U4))
ROW = sum(dtype.itemsize for _, dtype in COLUMNS)
FLUSHED = 2**20  # bytes of ids that are written together


def id_dtype(vocab_size: int) -> type[np.generic]:
    """The least unsigned width that holds every id of a vocabulary."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


@attrs.frozen
class ShardFiles:
    """The paths of a shard."""

    folder: Path
    number: int

    def path(self, kind: str) -> Path:
        """The file of this kind: tokens, documents, weights or json."""
        return self.folder / f"{self.number:05}.{kind}"


class ShardWriter:
    """Writes a shard; `with` completes it. Documents are added in order."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype[Any], weighted: bool) -> None:
        self._files = ShardFiles(folder, number)
        self._dtype = dtype.newbyteorder("<")
        self._weighted = weighted
        self._stack = ExitStack()
        self._columns = {"ends": array("Q"), "keys": array("Q"), "offsets": array("Q"), "sources": array("I")}
        self._sources: dict[str, int] = {}
        self._pending: list[np.ndarray] = []
        self._pending_weights: list[np.ndarray] = []
        self._pending_bytes = 0
        self.tokens = 0

    def __enter__(self) -> "ShardWriter":
        self._files.path("json").unlink(missing_ok=True)
        self._out = self._stack.enter_context(self._new("tokens"))
        self._out_weights = self._stack.enter_context(self._new("weights")) if self._weighted else None
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._stack.__exit__(kind, *error)  # type: ignore[arg-type]
            return
        self._flush()
        self._stack.close()
        with self._new("documents") as file:
            for name, dtype in COLUMNS:
                _append(file, np.array(self._columns[name], dtype))
        written: dict[str, FileWriter] = {"tokens": self._out, "documents": file}
        written |= {"weights": self._out_weights} if self._out_weights is not None else {}
        summary = {
            "documents": len(self._columns["ends"]),
            "tokens": self.tokens,
            "digests": {kind: writer.content().digest for kind, writer in written.items()},
            "sources": list(self._sources),
        }
        replace_file(self._files.path("json"), (json.dumps(summary, indent=1) + "\n").encode())

    def add(self, ids: np.ndarray, source: str, offset: int, weights: np.ndarray | None = None) -> None:
        """Append a document: ids, integers (tokens,), and weights, float32 (tokens,), for a store that has them."""
        held = ids.astype(self._dtype)
        key = blake2b(held.data, digest_size=8)
        self._pending.append(held)
        if self._weighted:
            own = np.ones(len(ids), "<f4") if weights is None else weights.astype("<f4")
            key.update(own.data)
            self._pending_weights.append(own)
        self.tokens += len(held)
        for name, value in (
            ("ends", self.tokens),
            ("keys", int.from_bytes(key.digest(), "little")),
            ("offsets", offset),
            ("sources", self._sources.setdefault(source, len(self._sources))),
        ):
            self._columns[name].append(value)
        self._pending_bytes += held.nbytes
        if self._pending_bytes >= FLUSHED:
            self._flush()

    def _new(self, kind: str) -> Any:
        path = self._files.path(kind)
        path.unlink(missing_ok=True)  # a killed process may have left it
        return new_file(path)

    def _flush(self) -> None:
        if self._pending:
            _append(self._out, np.concatenate(self._pending))
        if self._pending_weights and self._out_weights is not None:
            _append(self._out_weights, np.concatenate(self._pending_weights))
        self._pending, self._pending_weights, self._pending_bytes = [], [], 0


@attrs.frozen
class TokenShard:
    """A complete shard, memory-mapped when it is first read."""

    files: ShardFiles
    documents: int
    tokens: int
    dtype: np.dtype[Any]
    weighted: bool

    def check_sizes(self) -> None:
        """Raise UserError that names a file which is missing, or of another size than was written."""
        sizes = {"tokens": self.tokens * self.dtype.itemsize, "documents": self.documents * ROW}
        sizes |= {"weights": self.tokens * 4} if self.weighted else {}
        for kind, size in sizes.items():
            path = self.files.path(kind)
            found = path.stat().st_size if path.is_file() else -1
            if found != size:
                state = f"has {found} bytes instead of {size}" if found >= 0 else "is missing"
                raise UserError(f"{path} {state}: the shard is damaged; restore it, or make the store anew")

    def check_digests(self) -> None:
        """Read the shard and raise UserError that names a file whose content is not what was written."""
        self.check_sizes()
        for kind, digest in self.summary["digests"].items():
            path = self.files.path(kind)
            if hash_file(path).digest != digest:
                raise UserError(f"{path} has other content than was written: the shard is damaged; restore it")

    @property
    def summary(self) -> dict[str, Any]:
        """The content of the shard's JSON file: counts, digests, names of sources."""
        path = self.files.path("json")
        try:
            found: dict[str, Any] = json.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} can't be read ({error}): the shard is damaged; restore it") from error
        return found

    @cached_property
    def ids(self) -> np.ndarray:
        """All ids, (tokens,)."""
        return _mapped(self.files.path("tokens"), self.dtype, 0, self.tokens)

    @cached_property
    def weights(self) -> np.ndarray:
        """The weights of all ids, float32 (tokens,)."""
        return _mapped(self.files.path("weights"), np.dtype("<f4"), 0, self.tokens)

    @cached_property
    def ends(self) -> np.ndarray:
        """Where each document ends, uint64 (documents,)."""
        return self.column("ends")

    def column(self, name: str) -> np.ndarray:
        """A column of the documents, (documents,)."""
        place = 0
        for each, dtype in COLUMNS:
            if each == name:
                return _mapped(self.files.path("documents"), dtype, place, self.documents)
            place += dtype.itemsize * self.documents
        raise KeyError(name)

    def source(self, document: int) -> str:
        """The source of a document and its offset there."""
        return f"{self.summary['sources'][self.column('sources')[document]]}:{self.column('offsets')[document]}"


def _mapped(path: Path, dtype: np.dtype[Any], place: int, count: int) -> np.ndarray:
    # an empty file can't be mapped
    return np.memmap(path, dtype, "r", place, (count,)) if count else np.empty(0, dtype)


def _append(file: FileWriter, values: np.ndarray) -> None:
    if values.nbytes:
        assert file.sha256 is not None
        file.put(memoryview(values.view(np.uint8).data), file.sha256.size)
