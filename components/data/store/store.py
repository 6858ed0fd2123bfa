"""
Token store: a folder with shards and `store.json`, written when all shards are complete.

A shard is a file with ids, a file with columns by document, and two with digests. Its files are mapped into memory, and
every block is verified when a process first reads it.

`NNNNN.tokens` has all ids end to end, little-endian, 2 bytes each up to 65,536 ids and else 4. `NNNNN.documents` has
four columns, one after another, with a number per document: its end in the shard (uint64, tokens), a hash over its ids
(uint64), its offset in its source (uint64), and its source's index (uint32). `NNNNN.digests` has SHA-256 digests (32
bytes) per block with 2^16 bytes: for tokens, then documents. `NNNNN.json` is written last, with counts, source names,
and the digests' SHA-256; a shard without it is incomplete.
"""

import hashlib
import json
from array import array
from bisect import bisect_right
from contextlib import ExitStack
from functools import cached_property
from hashlib import blake2b, sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from drawloom import UserError
from drawloom.components.storage.durable_files import FileWriter, create_new_durable_file, read_file, replace_file
from drawloom.components.storage.strict_json import parse_strict_json
from drawloom.ports import DocumentPart, Split, TokenDocuments

BLOCK = 2**16  # bytes; part of the format; small, because shuffled documents are read one by one
MAX_SIZE = 2**32  # bytes of a JSON file or of the digests of a shard
DIGEST = hashlib.sha256().digest_size


def count_blocks(byte_count: int) -> int:
    """Return the block count for a file with `byte_count` bytes."""
    return -(-byte_count // BLOCK)


@attrs.frozen(eq=False)
class MappedFile:
    """
    Memory-mapped file with known digests.

    content: uint8 (bytes,). digests: concatenated SHA-256 over all blocks. `verified` has 1 for blocks verified by
    this process.
    """

    path: Path
    content: np.ndarray
    digests: memoryview
    verified: bytearray

    @classmethod
    def open(cls, path: Path, size: int, digests: memoryview) -> "MappedFile":
        """Map a file with `size` bytes without reading it."""
        # an empty file can't be mapped; a plain array is sliced in less time than a memmap
        content = np.asarray(np.memmap(path, np.uint8, "r", 0, (size,))) if size else np.empty(0, np.uint8)
        return cls(path, content, digests, bytearray(count_blocks(size)))

    def read(self, dtype: np.dtype[Any], offset: int, count: int) -> np.ndarray:
        """Return a view on `count` numbers from a byte offset. Raises UserError if one of their blocks has changed."""
        end = offset + count * dtype.itemsize
        first, last = offset // BLOCK, count_blocks(end)
        if self.verified.find(0, first, last) >= 0:
            self.verify_blocks(first, last)
        return self.content[offset:end].view(dtype)

    def verify_blocks(self, first_block: int, end_block: int) -> None:
        """Hash the unverified blocks from `first_block` to before `end_block`. Raises UserError if one has changed."""
        for number in range(first_block, end_block):
            if not self.verified[number]:
                block = self.content[number * BLOCK : (number + 1) * BLOCK]
                digest = self.digests[number * DIGEST : (number + 1) * DIGEST]
                if hashlib.sha256(block.data).digest() != digest:
                    end = number * BLOCK + len(block)
                    raise UserError(
                        f"{self.path} has other content than was written, in bytes {number * BLOCK} to {end}: the "
                        f"token store is damaged; restore the file, or remove {self.path.parent} and make it anew"
                    )
                self.verified[number] = 1


def read_file_following_link(path: Path) -> bytes:
    """Return a regular file's content, following a link. Raises OSError for a pipe or a device."""
    return read_file(path.resolve(), MAX_SIZE)


U8, U4 = np.dtype("<u8"), np.dtype("<u4")
COLUMNS = (("ends", U8), ("keys", U8), ("offsets", U8), ("sources", U4))
ROW = sum(dtype.itemsize for _, dtype in COLUMNS)
FLUSH_SIZE = 2**20  # bytes of ids per write
_DAMAGED = "the token store is damaged; restore the file, or remove {} and make it anew"


def choose_id_dtype(vocab_size: int) -> type[np.generic]:
    """Return the smallest unsigned dtype for a vocabulary's ids, uint16 or uint32."""
    return np.uint16 if vocab_size <= 1 << 16 else np.uint32


def get_shard_stem(folder: Path, number: int) -> Path:
    """Return the path of a shard's files without their suffixes: .tokens, .documents, .digests and .json."""
    return folder / f"{number:05}"


class ShardWriter:
    """Shard writer; leaving the `with` block completes the shard. Documents are added in order."""

    def __init__(self, folder: Path, number: int, dtype: np.dtype[Any]) -> None:
        self._stem = get_shard_stem(folder, number)
        self._dtype = dtype.newbyteorder("<")
        self._stack = ExitStack()
        self._columns = {"ends": array("Q"), "keys": array("Q"), "offsets": array("Q"), "sources": array("I")}
        self._sources: dict[str, int] = {}
        self._pending: list[np.ndarray] = []
        self._pending_bytes = 0
        self.tokens = 0

    def __enter__(self) -> "ShardWriter":
        self._stem.with_suffix(".json").unlink(missing_ok=True)
        self._out = self._stack.enter_context(self._create_or_replace_file("tokens"))
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
        # An empty file has no blocks.
        contents = [content for part in (self._out, file) if (content := part.sha256.finish()).size]
        digests = b"".join(bytes.fromhex(block) for content in contents for block in content.blocks)
        replace_file(self._stem.with_suffix(".digests"), digests)
        summary = {
            "documents": len(self._columns["ends"]),
            "tokens": self.tokens,
            "digests": sha256(digests).hexdigest(),
            "sources": list(self._sources),
        }
        replace_file(self._stem.with_suffix(".json"), (json.dumps(summary, indent=1) + "\n").encode())

    def append_document(self, ids: np.ndarray, source: str, offset: int) -> None:
        """Append a document: ids, integers (tokens,)."""
        stored_ids = ids.astype(self._dtype)
        key = blake2b(stored_ids.data, digest_size=8)
        self._pending.append(stored_ids)
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
        path = self._stem.with_suffix(f".{kind}")
        path.unlink(missing_ok=True)  # a killed process may have left it
        return create_new_durable_file(path, BLOCK)

    def _write_pending(self) -> None:
        """Write the pending ids."""
        if self._pending:
            _append_values(self._out, np.concatenate(self._pending))
        self._pending, self._pending_bytes = [], 0


@attrs.frozen
class TokenShard:
    """Complete shard, memory-mapped at the first read; `digest` is its JSON file's SHA-256."""

    stem: Path
    documents: int
    tokens: int
    dtype: np.dtype[Any]
    digest: str

    @classmethod
    def open_from_json(cls, stem: Path, dtype: np.dtype[Any]) -> "TokenShard":
        """Return a complete shard, as its JSON file describes it."""
        path = stem.with_suffix(".json")
        text = _read_store_file(path)
        summary = _parse_summary(path, text)
        return cls(stem, summary["documents"], summary["tokens"], dtype, sha256(text).hexdigest())

    @property
    def sizes(self) -> dict[str, int]:
        """File sizes in bytes, without the JSON file, in digest order."""
        sizes = {"tokens": self.tokens * self.dtype.itemsize, "documents": self.documents * ROW}
        return {**sizes, "digests": DIGEST * sum(map(count_blocks, sizes.values()))}

    def path(self, kind: str) -> Path:
        """Return the file for a kind: tokens, documents, digests or json."""
        return self.stem.with_suffix(f".{kind}")

    @property
    def paths(self) -> list[Path]:
        """All file paths."""
        return [self.path(kind) for kind in (*self.sizes, "json")]

    def check_file_sizes(self) -> None:
        """Raise UserError with the path to a file that is missing, has another size, or is a changed JSON file."""
        for kind, size in self.sizes.items():
            path = self.path(kind)
            actual = path.stat().st_size if path.is_file() else -1
            if actual != size:
                state = f"has {actual} bytes instead of {size}" if actual >= 0 else "is missing"
                raise UserError(f"{path} {state}: {_DAMAGED.format(path.parent)}")
        self._read_and_verify_file("json", self.digest)

    def check_file_contents(self) -> None:
        """Verify the shard's files. Raises UserError with the path to a file with changed content."""
        self.check_file_sizes()
        for file in (self.map_file(kind) for kind in self.sizes if kind != "digests"):
            file.verify_blocks(0, len(file.verified))

    @property
    def summary(self) -> dict[str, Any]:
        """The JSON file's content: counts, the digest over all digests, source names."""
        return _parse_summary(self.path("json"), self._read_and_verify_file("json", self.digest))

    @cached_property
    def document_ends(self) -> np.ndarray:
        """Document ends, uint64 (documents,)."""
        return self.read_document_column("ends")

    def read_document_column(self, name: str) -> np.ndarray:
        """Return a document column by its name in COLUMNS, (documents,)."""
        offset = 0
        for column, dtype in COLUMNS:
            if column == name:
                return self.map_file("documents").read(dtype, offset, self.documents)
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

    def map_file(self, kind: str) -> MappedFile:
        """Return a file from the shard, mapped at the first call."""
        if kind not in self._file_cache:
            size, start = self.sizes[kind], 0
            for other, length in self.sizes.items():
                if other == kind:
                    break
                start += DIGEST * count_blocks(length) if other != "digests" else 0
            blocks = memoryview(self._read_and_verify_file("digests", self.summary["digests"]))
            digests = blocks[start : start + DIGEST * count_blocks(size)]
            try:
                self._file_cache[kind] = MappedFile.open(self.path(kind), size, digests)
            except OSError as error:  # such as too many open files
                raise UserError(f"{self.path(kind)} can't be mapped: {error}") from error
        return self._file_cache[kind]

    def _read_and_verify_file(self, kind: str, digest: str) -> bytes:
        """Return a small file's content. Raises UserError if its SHA-256 differs."""
        path = self.path(kind)
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


def _append_values(file: FileWriter, values: np.ndarray) -> None:
    """Append an array's bytes."""
    if values.nbytes:
        file.write_at(memoryview(values.view(np.uint8).data), file.sha256.size)


FORMAT = 3
MAX_PARTS = 2**26  # values in `store.json`: three for each shard
STORE, LOCK = "store.json", "lock"


@attrs.frozen(eq=False)
class Store:
    """
    TokenDocuments in a token store; a shard is mapped when a document is first read.

    `vocab_size`, `eos_id` and `prefix_ids` come from the tokenizer, `tokenizer` is its digest.
    """

    folder: Path
    vocab_size: int
    eos_id: int
    prefix_ids: list[int]
    tokenizer: str
    fingerprint: str
    shards: list[TokenShard]

    @classmethod
    def open(cls, folder: Path) -> "Store":
        """Open a complete store. Raises UserError if the folder is not a store, or a file is missing or truncated."""
        store = cls.open_unchecked(folder)
        for shard in store.shards:
            shard.check_file_sizes()
        return store

    @classmethod
    def open_unchecked(cls, folder: Path) -> "Store":
        """Return the store described by `store.json`, without checking its shards."""
        index = read_index(folder / STORE)
        dtype = np.dtype(index["dtype"]).newbyteorder("<")
        shards = [
            TokenShard(get_shard_stem(folder, number), documents, tokens, dtype, digest)
            for number, (documents, tokens, digest) in enumerate(index["shards"])
        ]
        return cls(
            folder=folder,
            vocab_size=index["vocab_size"],
            eos_id=index["eos_id"],
            prefix_ids=index["prefix_ids"],
            tokenizer=index["tokenizer"],
            fingerprint=index["fingerprint"],
            shards=shards,
        )

    def find_faults(self) -> list[str]:
        """Verify all files. Describe changed files, and files foreign to the store."""
        faults = [fault for shard in self.shards if (fault := _describe_shard_fault(shard))]
        names = {STORE, LOCK, *(path.name for shard in self.shards for path in shard.paths)}
        for path in sorted(self.folder.iterdir()):
            if path.name not in names:
                faults.append(f"{path} is not a file of the token store; remove it")
            elif path.name == LOCK and path.stat().st_size:
                faults.append(f"{path} is not empty, although drawloom writes nothing into it; remove it")
        return faults

    @property
    def token_count(self) -> int:
        """Token count over all documents."""
        return sum(shard.tokens for shard in self.shards)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Token counts by document, int64 (documents,)."""
        lengths = np.empty(self._first_document_by_shard[-1], np.int64)
        for shard, start in zip(self.shards, self._first_document_by_shard, strict=False):
            lengths[start : start + shard.documents] = np.diff(shard.document_ends, prepend=np.uint64(0))
        return lengths

    @cached_property
    def document_hashes(self) -> np.ndarray:
        """Hashes over ids by document, uint64 (documents,)."""
        return np.concatenate([np.empty(0, np.uint64), *(shard.read_document_column("keys") for shard in self.shards)])

    def read(self, document: int, first: int, end: int) -> DocumentPart:
        """Return a view into a document's ids, at most up to its end."""
        shard, number = self._find_shard_and_document_number(document)
        begin, document_end = int(shard.document_ends[number - 1]) if number else 0, int(shard.document_ends[number])
        start, stop = begin + first, max(begin + first, min(begin + end, document_end))
        ids = shard.map_file("tokens").read(shard.dtype, start * shard.dtype.itemsize, stop - start)
        return DocumentPart(ids)

    def describe_origin(self, document: int) -> str:
        """Return a document's file, and its offset there."""
        shard, number = self._find_shard_and_document_number(document)
        return shard.describe_origin(number)

    @cached_property
    def _first_document_by_shard(self) -> list[int]:
        """First document numbers by shard, followed by the total document count."""
        return [0, *accumulate(shard.documents for shard in self.shards)]

    def _find_shard_and_document_number(self, document: int) -> tuple[TokenShard, int]:
        """Return a document's shard, and its number there."""
        index = bisect_right(self._first_document_by_shard, document) - 1
        return self.shards[index], document - self._first_document_by_shard[index]


def hash_documents(shards: list[TokenShard]) -> str:
    """Hash all documents' hashes and lengths with SHA-256, independently from the division into shards."""
    digest = hashlib.sha256()
    for shard in shards:
        lengths = np.diff(shard.document_ends, prepend=np.uint64(0)).astype("<u8")
        digest.update(np.stack([shard.read_document_column("keys"), lengths], axis=1).tobytes())
    return digest.hexdigest()


def encode_index_with_digest(index: dict[str, Any]) -> bytes:
    """Return the text for `store.json`: the index, with its JSON's SHA-256."""
    digest = hashlib.sha256(json.dumps(index).encode()).hexdigest()
    return (json.dumps({**index, "digest": digest}) + "\n").encode()


def read_index(path: Path) -> dict[str, Any]:
    """Return the index in `store.json`. Raises UserError if it is missing, changed, or has another format."""
    remedy = f"restore it, or remove {path.parent} and make the store anew"
    try:
        text = read_file_following_link(path)
        index: dict[str, Any] = parse_strict_json(text, max_values=MAX_PARTS)
    except FileNotFoundError as error:
        hint = "create it with `drawloom tokenize`, which also completes an unfinished store"
        raise UserError(f"{path.parent} is not a complete token store: there is no {STORE}; {hint}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read ({error}); {remedy}") from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        actual_format = index.get("format") if isinstance(index, dict) else None
        raise UserError(f"{path} has format {actual_format!r} instead of {FORMAT}; {remedy}")
    index.pop("digest", None)
    if text != encode_index_with_digest(index):
        raise UserError(f"{path} has other content than was written; {remedy}")
    return index


def _describe_shard_fault(shard: TokenShard) -> str:
    """Verify a shard's files, and describe the first fault; empty if there is none."""
    try:
        shard.check_file_contents()
    except UserError as error:
        return str(error)
    return ""


@attrs.frozen(eq=False)
class ChosenDocuments:
    """Document subset; chosen: the document numbers, int64 (documents,), a tensor shared by processes."""

    documents: TokenDocuments
    chosen: Tensor
    name: str

    @cached_property
    def lengths(self) -> np.ndarray:
        lengths: np.ndarray = self.documents.lengths[self.chosen.numpy()]
        return lengths

    @property
    def fingerprint(self) -> str:
        """Digest over all documents and the choice."""
        return hashlib.sha256(f"{self.documents.fingerprint} {self.name}".encode()).hexdigest()

    def read(self, document: int, first: int, end: int) -> DocumentPart:
        return self.documents.read(int(self.chosen[document]), first, end)

    def describe_origin(self, document: int) -> str:
        return self.documents.describe_origin(int(self.chosen[document]))


def select_split_documents(
    documents: TokenDocuments, document_hashes: np.ndarray, split: Split, validation_fraction: float
) -> ChosenDocuments:
    """Select a split's documents by their hashes, uint64 (documents,)."""
    # the highest bits of a hash suffice
    for_validation = document_hashes >> np.uint64(11) < np.uint64(int(validation_fraction * 2**53))
    chosen = np.flatnonzero(for_validation if split == "validation" else ~for_validation)
    return ChosenDocuments(documents, torch.from_numpy(chosen), f"{split} {validation_fraction}")
