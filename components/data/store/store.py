"""Token store: a folder with shards and `store.json`, written when all shards are complete."""

import hashlib
import json
from bisect import bisect_right
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from drawloom import UserError
from drawloom.components.data.store.shard import TokenShard, get_shard_stem, read_file_following_link
from drawloom.components.storage.strict_json import parse_strict_json
from drawloom.ports import DocumentPart, Split, TokenDocuments

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
        return DocumentPart(shard.read_ids(start, stop))

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
