"""
Token store shard: a file with ids, a file with columns by document, perhaps a file with weights, and two with digests.

`NNNNN.tokens` has all ids end to end, little-endian, 2 bytes each up to 65,536 ids and else 4.
`NNNNN.weights`, if there are weights, has a float32 per id. `NNNNN.documents` has four columns, one after another, with
a number per document: its end in the shard (uint64, tokens), a hash over ids and weights (uint64), its offset in its
source (uint64), and its source's index (uint32). `NNNNN.digests` has SHA-256 digests (32 bytes) per block with 2^16
bytes: for tokens, then weights, then documents. `NNNNN.json` is written last, with counts, source names, and the
digests' SHA-256; a shard without it is incomplete.
"""

import json
from array import array
from contextlib import ExitStack
from functools import cached_property
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from drawloom.components.data.store.blocks import BLOCK, DIGEST, MappedFile, count_blocks, read_file_following_link
from drawloom.components.storage.durable_files import FileWriter, create_new_durable_file, replace_file
from drawloom.graph import UserError

U8, U4 = np.dtype("<u8"), np.dtype("<u4")
WEIGHT = np.dtype("<f4")
COLUMNS = (("ends", U8), ("keys", U8), ("offsets", U8), ("sources", U4))
ROW = sum(dtype.itemsize for _, dtype in COLUMNS)
FLUSH_SIZE = 2**20  # bytes of ids per write
_DAMAGED = "the token store is damaged; restore the file, or remove {} and make it anew"


def choose_id_dtype(vocab_size: int) -> type[np.generic]:
    """Return the smallest unsigned dtype for a vocabulary's ids, uint16 or uint32."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


@attrs.frozen
class ShardFiles:
    """A shard's file paths."""

    folder: Path
    number: int

    def path(self, kind: str) -> Path:
        """Return the file for a kind: tokens, weights, documents, digests or json."""
        return self.folder / f"{self.number:05}.{kind}"


class ShardWriter:
    """Shard writer; leaving the `with` block completes the shard. Documents are added in order."""

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
        self._out = self._stack.enter_context(self._create_or_replace_file("tokens"))
        self._out_weights = (
            self._stack.enter_context(self._create_or_replace_file("weights")) if self._weighted else None
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._stack.__exit__(kind, *error)  # type: ignore[arg-type]
            return
        self._write_pending()
        self._stack.close()
        with self._create_or_replace_file("documents") as file:
            for name, dtype in COLUMNS:
                _append_values(file, np.array(self._columns[name], dtype))
        written = [self._out, *([self._out_weights] if self._out_weights is not None else []), file]
        digests = b"".join(map(_join_block_digests, written))
        replace_file(self._files.path("digests"), digests)
        summary = {
            "documents": len(self._columns["ends"]),
            "tokens": self.tokens,
            "digests": sha256(digests).hexdigest(),
            "sources": list(self._sources),
        }
        replace_file(self._files.path("json"), (json.dumps(summary, indent=1) + "\n").encode())

    def append_document(self, ids: np.ndarray, source: str, offset: int, weights: np.ndarray | None = None) -> None:
        """Append a document: ids, integers (tokens,), and for a store with weights, weights, float32 (tokens,)."""
        stored_ids = ids.astype(self._dtype)
        key = blake2b(stored_ids.data, digest_size=8)
        self._pending.append(stored_ids)
        if self._weighted:
            stored_weights = np.ones(len(ids), "<f4") if weights is None else weights.astype("<f4")
            key.update(stored_weights.data)
            self._pending_weights.append(stored_weights)
        self.tokens += len(stored_ids)
        for name, value in (
            ("ends", self.tokens),
            ("keys", int.from_bytes(key.digest(), "little")),
            ("offsets", offset),
            ("sources", self._sources.setdefault(source, len(self._sources))),
        ):
            self._columns[name].append(value)
        self._pending_bytes += stored_ids.nbytes
        if self._pending_bytes >= FLUSH_SIZE:
            self._write_pending()

    def _create_or_replace_file(self, kind: str) -> Any:
        """Create a file, in place of a killed process's file."""
        path = self._files.path(kind)
        path.unlink(missing_ok=True)  # a killed process may have left it
        return create_new_durable_file(path, BLOCK)

    def _write_pending(self) -> None:
        """Write the pending ids and weights."""
        if self._pending:
            _append_values(self._out, np.concatenate(self._pending))
        if self._pending_weights and self._out_weights is not None:
            _append_values(self._out_weights, np.concatenate(self._pending_weights))
        self._pending, self._pending_weights, self._pending_bytes = [], [], 0


@attrs.frozen
class TokenShard:
    """Complete shard, memory-mapped at the first read; `digest` is its JSON file's SHA-256."""

    files: ShardFiles
    documents: int
    tokens: int
    dtype: np.dtype[Any]
    weighted: bool
    digest: str

    @classmethod
    def open_from_json(cls, files: ShardFiles, dtype: np.dtype[Any], weighted: bool) -> "TokenShard":
        """Return a complete shard, as its JSON file describes it."""
        text = _read_store_file(files.path("json"))
        summary = _parse_summary(files.path("json"), text)
        return cls(files, summary["documents"], summary["tokens"], dtype, weighted, sha256(text).hexdigest())

    @property
    def sizes(self) -> dict[str, int]:
        """File sizes in bytes, without the JSON file, in digest order."""
        weights = {"weights": self.tokens * WEIGHT.itemsize} if self.weighted else {}
        sizes = {"tokens": self.tokens * self.dtype.itemsize, **weights, "documents": self.documents * ROW}
        return {**sizes, "digests": DIGEST * sum(map(count_blocks, sizes.values()))}

    @property
    def paths(self) -> list[Path]:
        """All file paths."""
        return [self.files.path(kind) for kind in (*self.sizes, "json")]

    def check_file_sizes(self) -> None:
        """Raise UserError with the path to a file that is missing, has another size, or is a changed JSON file."""
        for kind, size in self.sizes.items():
            path = self.files.path(kind)
            actual = path.stat().st_size if path.is_file() else -1
            if actual != size:
                state = f"has {actual} bytes instead of {size}" if actual >= 0 else "is missing"
                raise UserError(f"{path} {state}: {_DAMAGED.format(path.parent)}")
        self._read_and_verify_file("json", self.digest)

    def check_file_contents(self) -> None:
        """Verify the shard's files. Raises UserError with the path to a file with changed content."""
        self.check_file_sizes()
        for file in (self._map_file(kind) for kind in self.sizes if kind != "digests"):
            file.verify_all_blocks()

    @property
    def summary(self) -> dict[str, Any]:
        """The JSON file's content: counts, the digest over all digests, source names."""
        return _parse_summary(self.files.path("json"), self._read_and_verify_file("json", self.digest))

    @property
    def ids(self) -> np.ndarray:
        """All ids, (tokens,)."""
        return self.read_ids(0, self.tokens)

    @property
    def weights(self) -> np.ndarray:
        """Weights for all ids, float32 (tokens,)."""
        return self.read_weights(0, self.tokens)

    def read_ids(self, first: int, end: int) -> np.ndarray:
        """Return the token ids from `first` to before `end`."""
        return self._map_file("tokens").read(self.dtype, first * self.dtype.itemsize, end - first)

    def read_weights(self, first: int, end: int) -> np.ndarray:
        """Return the token weights, float32, from `first` to before `end`."""
        return self._map_file("weights").read(WEIGHT, first * WEIGHT.itemsize, end - first)

    @cached_property
    def document_ends(self) -> np.ndarray:
        """Document ends, uint64 (documents,)."""
        return self.read_document_column("ends")

    def read_document_column(self, name: str) -> np.ndarray:
        """Return a document column by its name in COLUMNS, (documents,)."""
        offset = 0
        for column, dtype in COLUMNS:
            if column == name:
                return self._map_file("documents").read(dtype, offset, self.documents)
            offset += dtype.itemsize * self.documents
        raise KeyError(name)

    def describe_origin(self, document: int) -> str:
        """Return a document's source and its offset there."""
        source = self.summary["sources"][self.read_document_column("sources")[document]]
        return f"{source}:{self.read_document_column('offsets')[document]}"

    @cached_property
    def _file_cache(self) -> dict[str, MappedFile]:
        """This process's mapped files, by kind."""
        return {}

    def _map_file(self, kind: str) -> MappedFile:
        """Return a file from the shard, mapped at the first call."""
        if kind not in self._file_cache:
            size, start = self.sizes[kind], 0
            for other, length in self.sizes.items():
                if other == kind:
                    break
                start += DIGEST * count_blocks(length) if other != "digests" else 0
            digests = self._block_digests[start : start + DIGEST * count_blocks(size)]
            try:
                self._file_cache[kind] = MappedFile.open(self.files.path(kind), size, digests)
            except OSError as error:  # such as too many open files
                raise UserError(f"{self.files.path(kind)} can't be mapped: {error}") from error
        return self._file_cache[kind]

    @cached_property
    def _block_digests(self) -> memoryview:
        """Block digests for all files, in the same order as `sizes`."""
        return memoryview(self._read_and_verify_file("digests", self.summary["digests"]))

    def _read_and_verify_file(self, kind: str, digest: str) -> bytes:
        """Return a small file's content. Raises UserError if its SHA-256 differs."""
        path = self.files.path(kind)
        content = _read_store_file(path)
        if sha256(content).hexdigest() != digest:
            raise UserError(f"{path} has other content than was written: {_DAMAGED.format(path.parent)}")
        return content


def _read_store_file(path: Path) -> bytes:
    """Read a small file. Raises UserError if it is missing or unreadable."""
    try:
        return read_file_following_link(path)
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}): {_DAMAGED.format(path.parent)}") from error


def _parse_summary(path: Path, text: bytes) -> dict[str, Any]:
    """Parse a shard's JSON file. Raises UserError if it is damaged."""
    try:
        summary: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path} can't be read ({error}): {_DAMAGED.format(path.parent)}") from error
    return summary


def _join_block_digests(file: FileWriter) -> bytes:
    """Return a file's block digests in succession; empty for an empty file."""
    content = file.finish_digest()
    return b"".join(map(bytes.fromhex, content.blocks)) if content.size else b""


def _append_values(file: FileWriter, values: np.ndarray) -> None:
    """Append an array's bytes."""
    if values.nbytes:
        assert file.sha256 is not None
        file.write_at(memoryview(values.view(np.uint8).data), file.sha256.size)
