"""Packed batches; a row's tokens are read when its batch is built."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import attrs
import numpy as np

from drawloom import UserError
from drawloom.components.data.mixed_documents import DocumentSource, list_document_sources
from drawloom.components.data.packing.pieces import RowIndex, RowPiece
from drawloom.ports import IGNORE_INDEX, DocumentPart, TokenBatch, TokenDocuments


@attrs.frozen
class JoinedIndexes:
    """Concatenated rows from several sources; `first` has the sources' first documents."""

    members: tuple[RowIndex, ...]
    first: tuple[int, ...]

    @cached_property
    def first_rows(self) -> list[int]:
        """First rows by member, followed by the total row count."""
        return [0, *accumulate(index.rows for index in self.members)]

    @property
    def rows(self) -> int:
        return self.first_rows[-1]

    @property
    def tokens(self) -> int:
        return sum(index.tokens for index in self.members)

    def pieces(self, row: int) -> list[RowPiece]:
        member = min(bisect_right(self.first_rows, row), len(self.members)) - 1
        pieces = self.members[member].pieces(row - self.first_rows[member])
        if offset := self.first[member]:
            return [piece._replace(document=offset + piece.document) for piece in pieces]
        return pieces


def build_batch(
    documents: TokenDocuments, pieces_by_row: Sequence[Sequence[RowPiece]], length: int, pad_id: int
) -> TokenBatch:
    """
    Return a batch with these pieces, packed from the left, with rows padded by `pad_id`.

    Pieces have their own positions and document ids, and so does the padding. The target for a piece's last token is
    the document's next token, if there is one. `reference` and `labels` have a document's value at its first
    token; they are None unless every document has one.
    """
    tokens = np.full((len(pieces_by_row), length), pad_id, np.int64)
    targets = np.full((len(pieces_by_row), length), IGNORE_INDEX, np.int64)
    weights = np.zeros((len(pieces_by_row), length), np.float32)
    starts = np.zeros((len(pieces_by_row), length), np.int64)  # 1 where a piece or the padding begins
    references = np.zeros((len(pieces_by_row), length), np.float64)
    labels = np.zeros((len(pieces_by_row), length), np.float32)
    padding = np.zeros((len(pieces_by_row), length), np.bool_)
    has_references, has_labels = any(pieces_by_row), any(pieces_by_row)
    for row, pieces in enumerate(pieces_by_row):
        begin = 0
        for document, first, last in pieces:
            # one token more than the piece has: the target of its last token
            ids, own_weights, reference, label = _read_document_range(documents, document, first, last + 1)
            end, targeted = begin + last - first, begin + len(ids) - 1
            tokens[row, begin:end] = ids[: last - first]
            targets[row, begin:targeted] = ids[1:]
            weights[row, begin:targeted] = 1.0 if own_weights is None else own_weights[1:]
            starts[row, begin] = 1
            has_references = has_references and reference is not None
            references[row, begin] = reference or 0
            has_labels = has_labels and label is not None
            labels[row, begin] = label or 0
            begin = end
        starts[row, begin : begin + 1] = 1
        padding[row, begin:] = True
    columns = np.arange(length)
    positions = columns - np.maximum.accumulate(np.where(starts > 0, columns, 0), axis=1)
    return TokenBatch.from_numpy(
        tokens=tokens,
        targets=targets,
        positions=positions,
        document_ids=np.cumsum(starts, axis=1) - 1,
        weights=weights,
        reference=references if has_references else None,
        labels=labels if has_labels else None,
        padding=padding,
    )


def _read_document_range(documents: TokenDocuments, document: int, first: int, end: int) -> DocumentPart:
    """
    Read a document's tokens from `first` to before `end`; the last one may be missing. Raises UserError with the
    position.
    """
    try:
        part = documents.read(document, first, end)
        if len(part.ids) < end - first - 1:
            raise ValueError(f"it has {len(part.ids)} tokens there instead of {end - first - 1}")
        return part
    except Exception as error:
        where = f"{documents.describe_origin(document)}: tokens {first} to {end - 2}"
        raise UserError(f"{where} can't be read ({type(error).__name__}: {error}); restore the file") from error


@attrs.frozen
class PackedSplit:
    """A split's documents and row index, for worker processes."""

    documents: TokenDocuments
    index: JoinedIndexes

    @property
    def sources(self) -> tuple[DocumentSource, ...]:
        """A mixture's sources, or one source without a name."""
        return list_document_sources(self.documents)
