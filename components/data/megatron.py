"""Token ids in Megatron-LM's `.bin` and `.idx` files, read in place."""

import hashlib
from functools import cached_property
from pathlib import Path
from struct import Struct
from typing import Any

import attrs
import numpy as np

from drawloom import UserError, between, component, internal, setting
from drawloom.components.data.store.store import ChosenDocuments, select_split_documents
from drawloom.ports import DocumentPart, Split

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
HEADER = Struct("<9sQBQQ")  # magic, version, type, sequences, document bounds


@component
class Megatron:
    """
    Memory-mapped Megatron-LM dataset, with or without end tokens, depending on how it was tokenized.

    A document's split depends only on its number.
    """

    path: Path = setting("path to both files without `.bin` and `.idx`, relative to the current directory")
    vocab_size: int = setting("the tokenizer's number of token ids", check=between(1, 2**31 + 1))
    eos_id: int = setting("end-of-document token id, which also pads rows", check=between(0, 2**31))
    validation_fraction: float = setting(
        "fraction of documents held out for evaluation; 0: none", default=0.05, check=between(0, 1)
    )
    _documents: Any = internal(None)

    def check_before_open(self) -> None:
        """Open the index, and check both files' sizes. Raises UserError for other files, and for truncated ones."""
        self._documents = MegatronDocuments.open(self.path, self.vocab_size)

    def documents(self, split: Split) -> ChosenDocuments:
        keys = np.arange(1, len(self._documents.lengths) + 1, dtype=np.uint64)
        keys *= np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(32)
        keys *= np.uint64(0xBF58476D1CE4E5B9)
        return select_split_documents(self._documents, keys, split, self.validation_fraction)


@attrs.frozen(eq=False)
class MegatronDocuments:
    """Documents in the files `path`.bin and `path`.idx; TokenDocuments."""

    path: Path
    dtype: str
    sequences: int
    bounds: int
    vocab_size: int

    @classmethod
    def open(cls, path: Path, vocab_size: int) -> "MegatronDocuments":
        """Read the header, and compare both files' sizes with it."""
        index, tokens = path.with_name(f"{path.name}.idx"), path.with_name(f"{path.name}.bin")
        try:
            with index.open("rb") as file:
                header = file.read(HEADER.size)
            sizes = index.stat().st_size, tokens.stat().st_size
        except OSError as error:
            raise UserError(f"path: {error.filename} can't be read ({error.strerror})") from error
        magic, version, code, sequences, bounds = HEADER.unpack(header.ljust(HEADER.size, b"\0"))
        if (magic, version) != (MAGIC, VERSION) or code not in DTYPES:
            raise UserError(f"path: {index} is not an index file of Megatron-LM; write the path without `.idx`")
        documents = cls(path, DTYPES[code], sequences, bounds, vocab_size)
        if sizes[0] != (index_bytes := HEADER.size + 12 * sequences + 8 * bounds):
            raise UserError(f"path: {index} has {sizes[0]} bytes instead of {index_bytes}; copy the file again")
        if sizes[1] < (token_bytes := int(documents._document_token_offsets[-1]) * np.dtype(documents.dtype).itemsize):
            raise UserError(
                f"path: {tokens} is cut off: it has {sizes[1]} bytes instead of {token_bytes}; copy it again"
            )
        return documents

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self._document_token_offsets)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the index and the token count; the tokens themselves are not read."""
        index = self.path.with_name(f"{self.path.name}.idx")
        with index.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update(str(len(self._token_ids)).encode())
        return digest.hexdigest()

    def read(self, document: int, first: int, end: int) -> DocumentPart:
        """
        Return a view into a document's ids, without weights; it ends with the document if `end` is beyond its
        end. Raises ValueError for an id that is not below `vocab_size`.
        """
        begin, document_end = self._document_token_offsets[document : document + 2].tolist()
        ids = self._token_ids[begin + first : min(begin + end, document_end)]
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(f"its ids are from {ids.min()} to {ids.max()}, and vocab_size is {self.vocab_size}")
        return DocumentPart(ids)

    def describe_origin(self, document: int) -> str:
        """Return the document's file and number."""
        return f"{self.path}.bin:{document}"

    @cached_property
    def _token_ids(self) -> np.ndarray:
        """All token ids, mapped from the `.bin` file."""
        path = self.path.with_name(f"{self.path.name}.bin")
        return np.memmap(path, self.dtype, "r") if path.stat().st_size else np.empty(0, self.dtype)

    @cached_property
    def _document_token_offsets(self) -> np.ndarray:
        """Offsets of documents in the `.bin` file, and the last one's end, in tokens, int64 (documents + 1,)."""
        content = np.fromfile(self.path.with_name(f"{self.path.name}.idx"), np.uint8, offset=HEADER.size)
        sizes = content[: 4 * self.sequences].view("<i4")
        bounds = content[12 * self.sequences :].view("<i8")
        # the file stores sequences one after another
        ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        return ends[bounds] if len(bounds) else ends[:1]
