"""Text documents in independently readable parts, their splits, and base classes for corpora."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, Protocol, get_args

import attrs

from drawloom import between, internal, setting
from drawloom.graph import component_base_class
from drawloom.ports import Split, TokenDocuments, Tokenizer

PART_BYTES = 2**26
"""Approximate bytes of files per part: large enough to hide its overhead, small enough to lose when killed."""


@attrs.frozen
class Document:
    """A document's text, its file, and its offset there: a byte in a text file, or a table row's number."""

    text: str
    source: str
    offset: int


class Part(Protocol):
    """Documents that one process reads. It can be pickled, and its `repr` changes with the underlying files."""

    @property
    def byte_count(self) -> int:
        """Bytes to read, for the progress."""

    def documents(self) -> Iterator[Document]:
        """Yield the documents in order, reading one at a time."""


def file_globs(files: str) -> Any:
    """Return the setting for globs that select files."""
    return setting(
        f"globs for {files}, relative to the current directory; `**` crosses folders",
        globs=True,
        check=lambda paths: None if paths else "an empty list names no file",
    )


def validation_fraction(units: str) -> Any:
    """Return the setting for the validation split's share."""
    return setting(f"fraction of {units} held out for evaluation; 0: none", default=0.05, check=between(0, 1))


def choose_split(content: bytes, validation_fraction: float) -> Split:
    """
    Return a document's split, from a hash of its content; `validation_fraction` is 0 to 1.

    The content is all training sees, so copies are never in both splits: of answers, their prompt alone.
    """
    fraction = int.from_bytes(blake2b(content, digest_size=8).digest(), "big") / 2**64
    return "validation" if fraction < validation_fraction else "train"


def wrap_parts_for_split(parts: Sequence[Part], split: Split, validation_fraction: float) -> list["SplitPart"]:
    """
    Wrap parts, to read only one split's documents.

    In a corpus so small that a split would be empty, documents are divided instead: the last characters,
    `validation_fraction` of all, are in the validation split. With a fraction of 0 or 1, one split is empty.
    """
    within = 0 < validation_fraction < 1 and not _do_both_splits_have_text(parts, validation_fraction)
    return [SplitPart(part, split, validation_fraction, within) for part in parts]


def iterate_texts(parts: Iterable[Part]) -> Iterator[str]:
    """Iterate over all documents' texts."""
    return (document.text for part in parts for document in part.documents())


@attrs.frozen
class SplitPart:
    """One split's documents in a part. If `within`, every document is divided between the splits instead."""

    part: Part
    split: Split
    fraction: float
    within: bool

    @property
    def byte_count(self) -> int:
        """Bytes to read, scaled to the split's share."""
        return int(self.part.byte_count * (self.fraction if self.split == "validation" else 1 - self.fraction))

    def documents(self) -> Iterator[Document]:
        """Yield the split's documents, in order."""
        for document in self.part.documents():
            if self.within:  # its beginning is for training, its end for validation
                cut = int(len(document.text) * (1 - self.fraction))
                yield attrs.evolve(document, text=document.text[:cut] if self.split == "train" else document.text[cut:])
            elif choose_split(document.text.encode(), self.fraction) == self.split:
                yield document


def _do_both_splits_have_text(parts: Iterable[Part], validation_fraction: float) -> bool:
    """Return whether both splits have a non-empty text; in a large corpus, the first few documents suffice."""
    missing = set(get_args(Split))
    for document in (document for part in parts for document in part.documents()):
        if document.text:
            missing.discard(choose_split(document.text.encode(), validation_fraction))
        if not missing:
            return True
    return False


class DividedCorpus(ABC):
    """
    Base for texts in files.

    A document's split depends only on its text: documents can be moved and added, and copies are never in both splits.
    If there are only a few documents, their ends are validation data.
    """

    validation_fraction: float

    @abstractmethod
    def divide(self) -> Sequence[Part]:
        """Divide the files into independently readable parts."""

    def documents(self, split: Split) -> Iterator[str]:
        """Return a split's texts. Raises UserError with the position of a malformed document."""
        return iterate_texts(self.parts(split))

    def parts(self, split: Split) -> Sequence[Part]:
        """Return a split's documents in independently readable parts."""
        return wrap_parts_for_split(self.divide(), split, self.validation_fraction)


@component_base_class
class EncodedCorpus:
    """Base for corpora with documents that were encoded by a tokenizer."""

    tokenizer: Tokenizer
    _splits: dict[Split, TokenDocuments] = internal(factory=dict)

    def close(self) -> None:
        """Free the tokens, or close their stores."""
        self._splits = {}

    @property
    def vocab_size(self) -> int:
        """The tokenizer's vocabulary size."""
        return self.tokenizer.vocab_size

    @property
    def eos_id(self) -> int:
        """The tokenizer's end token."""
        return self.tokenizer.eos_id

    def documents(self, split: Split) -> TokenDocuments:
        return self._splits[split]
