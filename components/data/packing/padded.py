"""One document in a row, with padding."""

import numpy as np

from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.packing.groups import cut, group_documents, in_order
from drawloom.components.data.packing.packed_rows import PackedRows
from drawloom.components.data.packing.rows import RowIndex
from drawloom.graph import component


@component
class Padded(PackedRows):
    """A row for each document, padded at its end; a document longer than a row is cut into several."""

    def index_of(self, lengths: np.ndarray, order: Permutation | None) -> RowIndex:
        """Groups of one document; lengths: (documents,)."""
        return group_documents(lengths, cut(in_order(lengths, order)), self.length, one_each)


def one_each(documents: np.ndarray, _sizes: np.ndarray, _capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """The documents as they are, (items,), and 1 for each, (rows,)."""
    return documents, np.ones(len(documents), np.int64)
