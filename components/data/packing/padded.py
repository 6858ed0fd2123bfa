"""Packing with one document per row, and padding."""

import numpy as np

from drawloom import component
from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.packing.groups import GroupedItems, build_rows_from_documents, split_into_blocks
from drawloom.components.data.packing.packed_rows import PackedRows, select_trainable_documents
from drawloom.components.data.packing.pieces import RowIndex


@component
class Padded(PackedRows):
    """One document per row, padded at its end; a document longer than a row is cut into several rows."""

    def build_row_index(self, lengths: np.ndarray, order: Permutation | None) -> RowIndex:
        """Group every document alone; lengths: (documents,)."""
        return build_rows_from_documents(
            lengths,
            split_into_blocks(select_trainable_documents(lengths, order)),
            self.length,
            assign_one_row_per_document,
        )


def assign_one_row_per_document(documents: np.ndarray, _sizes: np.ndarray, _capacity: int) -> GroupedItems:
    """Put every document, (items,), into its own row."""
    return GroupedItems(documents, np.ones(len(documents), np.int64))
