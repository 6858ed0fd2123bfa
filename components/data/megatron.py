"""Documents of token ids that Megatron-LM has tokenized: a `.bin` and an `.idx` file, read as they are."""

import hashlib
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from drawloom.components.data.store.splits import ChosenDocuments, split_documents
from drawloom.components.ports.corpus import DocumentPart, Split
from drawloom.graph import UserError, between, component, setting

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
HEADER = len(MAGIC) + 8 + 1 + 8 + 8  # magic, version, type, sequences, document bounds


@component
class Megatron:
    """
    A data set of Megatron-LM, memory-mapped. Whether documents have end tokens is as they were tokenized.

    The split of a document depends on its number.
    """

    path: Path = setting(doc="the two files without `.bin` and `.idx`, relative to the current directory")
    vocab_size: int = setting(check=between(1, 2**31 + 1), doc="the ids of the tokenizer")
    eos_id: int = setting(check=between(0, 2**31), doc="the id that ends a document; it fills the rest of a row")
    validation_fraction: float = setting(
        default=0.05, check=between(0, 1), doc="fraction of the documents to hold out for evaluation; 0: none"
    )
    _documents: Any = attrs.field(init=False, default=None)

    def check_machine(self) -> None:
        """Map the files. Raises UserError if they are none of Megatron's, or one is cut off."""
        self._documents = MegatronDocuments.open(self.path)

    def documents(self, split: Split) -> ChosenDocuments:
        """The documents of a split."""
        keys = np.arange(1, len(self._documents.lengths) + 1, dtype=np.uint64)
        keys *= np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(32)
        keys *= np.uint64(0xBF58476D1CE4E5B9)
        return split_documents(self._documents, keys, split, self.validation_fraction)


@attrs.frozen(eq=False)
class MegatronDocuments:
    """The documents of the files `path`.bin and `path`.idx, TokenDocuments."""

    path: Path
    dtype: str
    sequences: int
    bounds: int

    @classmethod
    def open(cls, path: Path) -> "MegatronDocuments":
        """Read the header, and compare the sizes of both files with it."""
        index, tokens = path.with_name(f"{path.name}.idx"), path.with_name(f"{path.name}.bin")
        try:
            with index.open("rb") as file:
                header = file.read(HEADER)
            sizes = index.stat().st_size, tokens.stat().st_size
        except OSError as error:
            raise UserError(f"path: {error.filename} can't be read ({error.strerror})") from error
        place = len(MAGIC)
        code = header[place + 8] if len(header) == HEADER else 0
        if header[:place] != MAGIC or header[place] != VERSION or code not in DTYPES:
            raise UserError(f"path: {index} is not an index file of Megatron-LM; write the path without `.idx`")
        sequences, bounds = np.frombuffer(header, "<u8", 2, place + 9).tolist()
        made = cls(path, DTYPES[code], sequences, bounds)
        if sizes[0] != (whole := HEADER + 12 * sequences + 8 * bounds):
            raise UserError(f"path: {index} has {sizes[0]} bytes instead of {whole}; copy the file again")
        if sizes[1] < (least := int(made._starts[-1]) * np.dtype(made.dtype).itemsize):
            raise UserError(f"path: {tokens} is cut off: it has {sizes[1]} bytes instead of {least}; copy it again")
        return made

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of each document, int64 (documents,)."""
        return np.diff(self._starts)

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 of the index, and the size of the tokens, which are not read."""
        index = self.path.with_name(f"{self.path.name}.idx")
        with index.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
        digest.update(str(len(self._ids)).encode())
        return digest.hexdigest()

    def read(self, document: int, first: int, last: int) -> DocumentPart:
        """A view of ids of a document, without weights; up to its end, if `last` is beyond that."""
        begin, end = self._starts[document : document + 2].tolist()
        return DocumentPart(self._ids[begin + first : min(begin + last, end)])

    def source(self, document: int) -> str:
        """The file, and the document's number."""
        return f"{self.path}.bin:{document}"

    @cached_property
    def _ids(self) -> np.ndarray:
        path = self.path.with_name(f"{self.path.name}.bin")
        return np.memmap(path, self.dtype, "r") if path.stat().st_size else np.empty(0, self.dtype)

    @cached_property
    def _starts(self) -> np.ndarray:
        """Where each document begins, and the last one ends, int64 (documents + 1,)."""
        held = np.fromfile(self.path.with_name(f"{self.path.name}.idx"), np.uint8, offset=HEADER)
        sizes = held[: 4 * self.sequences].view("<i4")
        bounds = held[12 * self.sequences :].view("<i8")
        # sequences are written one after another
        ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        return ends[bounds] if len(bounds) else ends[:1]

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in attrs.fields(type(self))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            object.__setattr__(self, name, value)
