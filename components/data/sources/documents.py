"""Documents of text in parts that can be read independently, and their split."""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from typing import Protocol, get_args

import attrs

from drawloom.components.ports.corpus import Split

PART_BYTES = 2**26
"""About how many bytes of files make a part: large beside its costs, small beside what a killed process may lose."""


@attrs.frozen
class Document:
    """
    A text, its file, and its offset there: a byte of a text file or a line, the number of a row of a table.

    A hash of `key` determines its split.
    """

    text: str
    source: str
    offset: int
    key: bytes


class Part(Protocol):
    """Documents that one process reads. It can be pickled; its `repr` differs if the files behind it do."""

    @property
    def size(self) -> int:
        """The bytes to read, for the progress."""
        ...

    def documents(self) -> Iterator[Document]:
        """The documents in order, read one by one."""
        ...


def split_of(key: bytes, validation_fraction: float) -> Split:
    """The split of a document, by a hash of its key; `validation_fraction` is 0 to 1."""
    fraction = int.from_bytes(blake2b(key, digest_size=8).digest(), "big") / 2**64
    return "validation" if fraction < validation_fraction else "train"


def split_parts(parts: Sequence[Part], split: Split, fraction: float) -> list["SplitPart"]:
    """
    The parts with the documents of one split.

    A corpus so small that a split would be empty is divided within documents instead: the last part of each, `fraction`
    of its characters, is in the validation split. With a fraction of 0 or 1, one split is empty.
    """
    within = 0 < fraction < 1 and not _has_both_splits(parts, fraction)
    return [SplitPart(part, split, fraction, within) for part in parts]


def texts_of(parts: Iterable[Part]) -> Iterator[str]:
    """The texts of all documents."""
    return (document.text for part in parts for document in part.documents())


@attrs.frozen
class SplitPart:
    """The documents of a part that belong to a split; or the share of a split in each, if `within` documents."""

    part: Part
    split: Split
    fraction: float
    within: bool

    @property
    def size(self) -> int:
        """The bytes to read, scaled to the split's share."""
        return int(self.part.size * (self.fraction if self.split == "validation" else 1 - self.fraction))

    def documents(self) -> Iterator[Document]:
        """Those of the split, in order."""
        for document in self.part.documents():
            if self.within:
                yield attrs.evolve(document, text=self._share(document.text))
            elif split_of(document.key, self.fraction) == self.split:
                yield document

    def _share(self, text: str) -> str:
        cut = int(len(text) * (1 - self.fraction))
        return text[:cut] if self.split == "train" else text[cut:]


def _has_both_splits(parts: Iterable[Part], fraction: float) -> bool:
    """Whether each split has a text that is not empty; in a large corpus the first few documents show it."""
    missing = set(get_args(Split))
    for document in (document for part in parts for document in part.documents()):
        if document.text:
            missing.discard(split_of(document.key, fraction))
        if not missing:
            return True
    return False
