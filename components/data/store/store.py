"""A token store: a folder of shards and `store.json`, which is written when all shards are complete."""

import hashlib
import json
from bisect import bisect_right
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from drawloom.components.data.store.shard import ShardFiles, TokenShard
from drawloom.components.ports.corpus import DocumentPart
from drawloom.graph import UserError

FORMAT = 1
STORE = "store.json"


@attrs.frozen(eq=False)
class Store:
    """
    The documents of a store, TokenDocuments. Nothing but `store.json` is read until documents are.

    `vocab_size` and `eos_id` are the tokenizer's, `tokenizer` is its digest.
    """

    folder: Path
    vocab_size: int
    eos_id: int
    tokenizer: str
    fingerprint: str
    shards: list[TokenShard]

    @classmethod
    def open(cls, folder: Path) -> "Store":
        """Open a complete store. Raises UserError if it is none, or if a file of it is missing or cut off."""
        path = folder / STORE
        try:
            held = json.loads(path.read_text("utf-8"))
        except FileNotFoundError as error:
            hint = "make it with `drawloom tokenize`, which also completes one that was begun"
            raise UserError(f"{folder} is no complete token store: there is no {STORE}; {hint}") from error
        except (OSError, ValueError) as error:
            raise UserError(f"{path} can't be read ({error}); restore it, or make the store anew") from error
        if held.get("format") != FORMAT:
            raise UserError(f"{path} has format {held.get('format')!r} instead of {FORMAT}; make the store anew")
        dtype = np.dtype(held["dtype"]).newbyteorder("<")
        shards = [
            TokenShard(ShardFiles(folder, number), documents, tokens, dtype, held["weighted"])
            for number, (documents, tokens) in enumerate(held["shards"])
        ]
        for shard in shards:
            shard.check_sizes()
        return cls(folder, held["vocab_size"], held["eos_id"], held["tokenizer"], held["fingerprint"], shards)

    @property
    def token_count(self) -> int:
        """The tokens of all documents."""
        return sum(shard.tokens for shard in self.shards)

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of each document, int64 (documents,)."""
        lengths = np.empty(self._starts[-1], np.int64)
        for shard, start in zip(self.shards, self._starts, strict=False):
            lengths[start : start + shard.documents] = np.diff(shard.ends, prepend=np.uint64(0))
        return lengths

    @cached_property
    def keys(self) -> np.ndarray:
        """A hash of each document's ids and weights, uint64 (documents,)."""
        return np.concatenate([np.empty(0, np.uint64), *(shard.column("keys") for shard in self.shards)])

    def read(self, document: int, first: int, last: int) -> DocumentPart:
        """Views of ids of a document, and of weights if the store has them; up to its end, if `last` is beyond that."""
        shard, number = self._shard(document)
        begin, end = int(shard.ends[number - 1]) if number else 0, int(shard.ends[number])
        part = slice(begin + first, min(begin + last, end))
        return DocumentPart(shard.ids[part], shard.weights[part] if shard.weighted else None)

    def source(self, document: int) -> str:
        """The file that a document is from, and its offset there."""
        shard, number = self._shard(document)
        return shard.source(number)

    @cached_property
    def _starts(self) -> list[int]:
        """The number of the first document of each shard, and of all documents."""
        return [0, *accumulate(shard.documents for shard in self.shards)]

    def _shard(self, document: int) -> tuple[TokenShard, int]:
        """The shard of a document, and its number there."""
        place = bisect_right(self._starts, document) - 1
        return self.shards[place], document - self._starts[place]

    def __getstate__(self) -> dict[str, Any]:
        """What `store.json` says: a worker process maps the shards itself."""
        return {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)


def fingerprint_of(shards: list[TokenShard]) -> str:
    """A SHA-256 of the hashes and lengths of all documents, however they are divided into shards."""
    digest = hashlib.sha256()
    for shard in shards:
        lengths = np.diff(shard.ends, prepend=np.uint64(0)).astype("<u8")
        digest.update(np.stack([shard.column("keys"), lengths], axis=1).tobytes())
    return digest.hexdigest()
