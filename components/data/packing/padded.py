"""One document in a row, with padding."""

import numpy as np

from drawloom.components.data.packing.groups import group_documents
from drawloom.components.data.packing.packed_rows import PackedRows
from drawloom.components.data.packing.rows import RowIndex
from drawloom.graph import component


@component
class Padded(PackedRows):
    """A row for each document, padded at its end; a document longer than a row is cut into several."""

    def index_of(self, lengths: np.ndarray, order: np.ndarray) -> RowIndex:
        """Groups of one document."""
        return group_documents(lengths, order, self.length, one_each)


def one_each(sizes: np.ndarray, _capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Items by row, (items,), and items of each row, (rows,)."""
    return np.arange(len(sizes)), np.ones(len(sizes), np.int64)
