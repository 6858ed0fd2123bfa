"""The documents of several sources, one source after another."""

from bisect import bisect_right
from functools import cached_property
from hashlib import sha256
from itertools import accumulate

import attrs
import numpy as np

from drawloom.components.ports.corpus import TokenDocuments


@attrs.frozen(eq=False)
class DocumentSource:
    """The documents of a source; `weight` is its share of the tokens that are trained on, relative to others."""

    name: str
    documents: TokenDocuments
    weight: float


@attrs.frozen(eq=False)
class MixedDocuments:
    """TokenDocuments of several sources."""

    sources: tuple[DocumentSource, ...]

    @cached_property
    def lengths(self) -> np.ndarray:
        """The tokens of each document."""
        lengths: np.ndarray = np.concatenate([source.documents.lengths for source in self.sources])
        return lengths

    @property
    def fingerprint(self) -> str:
        """Of the documents of all sources and their names; not of their weights."""
        parts = [f"{source.name} {source.documents.fingerprint}\n" for source in self.sources]
        return sha256("".join(parts).encode()).hexdigest()

    def tokens(self, document: int, first: int, last: int) -> np.ndarray:
        """Ids of a document."""
        source, number = self._place(document)
        return source.documents.tokens(number, first, last)

    def weights(self, document: int, first: int, last: int) -> np.ndarray | None:
        """The weights of these tokens."""
        source, number = self._place(document)
        return source.documents.weights(number, first, last)

    def reference(self, document: int) -> float | None:
        """What the document's source has."""
        source, number = self._place(document)
        return source.documents.reference(number)

    def source(self, document: int) -> str:
        """The name of the source, and where the document comes from there."""
        source, number = self._place(document)
        return f"{source.name}: {source.documents.source(number)}"

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *accumulate(len(source.documents.lengths) for source in self.sources)]

    def _place(self, document: int) -> tuple[DocumentSource, int]:
        number = bisect_right(self._starts, document) - 1
        return self.sources[number], document - self._starts[number]


def document_sources(documents: TokenDocuments) -> tuple[DocumentSource, ...]:
    """The sources of documents: those of a mixture, or one without a name."""
    return documents.sources if isinstance(documents, MixedDocuments) else (DocumentSource("", documents, 1.0),)
