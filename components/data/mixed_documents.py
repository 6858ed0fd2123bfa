"""A mixture's documents, from several sources."""

from bisect import bisect_right
from functools import cached_property
from hashlib import sha256
from itertools import accumulate

import attrs
import numpy as np

from drawloom.ports import DocumentPart, TokenDocuments


@attrs.frozen(eq=False)
class DocumentSource:
    """One source's documents; `weight` is its relative share of the training tokens."""

    name: str
    documents: TokenDocuments
    weight: float


@attrs.frozen(eq=False)
class MixedDocuments:
    """Concatenated TokenDocuments from several sources."""

    sources: tuple[DocumentSource, ...]

    @cached_property
    def lengths(self) -> np.ndarray:
        """Token counts by document, (documents,)."""
        lengths: np.ndarray = np.concatenate([source.documents.lengths for source in self.sources])
        return lengths

    @property
    def fingerprint(self) -> str:
        """Digest over all sources and their names, without their weights."""
        parts = [f"{source.name} {source.documents.fingerprint}\n" for source in self.sources]
        return sha256("".join(parts).encode()).hexdigest()

    def read(self, document: int, first: int, end: int) -> DocumentPart:
        source, number = self._find_source_and_document_number(document)
        return source.documents.read(number, first, end)

    def describe_origin(self, document: int) -> str:
        """Return the source's name, and the document's origin in it."""
        source, number = self._find_source_and_document_number(document)
        return f"{source.name}: {source.documents.describe_origin(number)}"

    @cached_property
    def _first_document_by_source(self) -> list[int]:
        """First document numbers by source, followed by the total document count."""
        return [0, *accumulate(len(source.documents.lengths) for source in self.sources)]

    def _find_source_and_document_number(self, document: int) -> tuple[DocumentSource, int]:
        """Return a document's source, and its number there."""
        index = bisect_right(self._first_document_by_source, document) - 1
        return self.sources[index], document - self._first_document_by_source[index]


def list_document_sources(documents: TokenDocuments) -> tuple[DocumentSource, ...]:
    """Return a mixture's sources, or all documents as one source without a name."""
    return documents.sources if isinstance(documents, MixedDocuments) else (DocumentSource("", documents, 1.0),)
