"""Concatenating packing: documents are cut into full rows; a document may continue in the next row."""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from torch import Tensor

from drawloom import NodeView, Problem, component
from drawloom.components.data.packing.packed_rows import PackedRows, find_document_nodes, select_trainable_documents
from drawloom.components.data.packing.pieces import RowIndex, RowPiece
from drawloom.ports import answers_prompts

if TYPE_CHECKING:
    from drawloom.components.data.order.permutation import Permutation


@component
class Concatenated(PackedRows):
    """
    Concatenated documents, cut into rows; a document across a row's end restarts in the next row.

    Every row is full except the last one, which is padded, so every token is used once in an epoch.
    """

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Warn of conversations, because a cut separates an answer from its question."""
        yield from super().constraints(node)
        for source in find_document_nodes(node):
            if answers_prompts(source.component):
                text = (
                    f"a row's end cuts conversations of [{source.name}], and an answer is trained without its question"
                )
                yield node.warning("use", text, 'write use = "data.packing.best_fit"')

    def build_row_index(self, lengths: np.ndarray, order: "Permutation | None") -> RowIndex:
        """Concatenate the documents into a stream; lengths: (documents,)."""
        documents = select_trainable_documents(lengths, order)
        ends = np.cumsum(lengths[documents], dtype=np.int64)
        return Stream(torch.from_numpy(documents), torch.from_numpy(ends), self.length)


@attrs.frozen(eq=False)
class Stream:
    """Whole documents in a stream, cut every `length` tokens; `order` and `ends` are int64 (documents,)."""

    order: Tensor
    ends: Tensor
    length: int

    @property
    def tokens(self) -> int:
        """Token count over all rows."""
        return min(self._document_token_count, self.rows * self.length)

    @cached_property
    def rows(self) -> int:
        """Row count; the stream's last token has no target and begins no row."""
        return -(-max(self._document_token_count - 1, 0) // self.length)

    @cached_property
    def _document_token_count(self) -> int:
        """Token count over all documents."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def pieces(self, row: int) -> list[RowPiece]:
        """Return the document parts between two cuts."""
        if not 0 <= row < self.rows:
            raise IndexError(f"there is no row {row} of {self.rows}")
        begin, end = row * self.length, min((row + 1) * self.length, self._document_token_count)
        ends = self.ends.numpy()
        first, last = np.searchsorted(ends, [begin, end - 1], side="right").tolist()
        inner_ends = ends[first : last + 1]
        starts = np.concatenate([ends[first - 1 : first] if first else [0], inner_ends[:-1]])
        columns = (
            self.order[first : last + 1].tolist(),
            (np.maximum(starts, begin) - starts).astype(np.int64).tolist(),
            (np.minimum(inner_ends, end) - starts).astype(np.int64).tolist(),
        )
        return list(map(RowPiece._make, zip(*columns, strict=True)))

    def tokens_per_row(self) -> np.ndarray:
        """Return the token count per row, int64 (rows,); the last row has the rest."""
        return np.minimum(self.tokens - np.arange(self.rows) * self.length, self.length)
