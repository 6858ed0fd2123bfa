"""
First-fit packing: documents, in order, go into the first row with enough space.

Documents are packed in runs with `RUN` documents, and many runs at once: one numpy step packs one document per run.
"""

import numpy as np

from drawloom import component
from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.packing.groups import (
    GroupedItems,
    RowAssignment,
    build_rows_from_documents,
    group_items_by_row,
    split_into_blocks,
)
from drawloom.components.data.packing.packed_rows import PackedRows, select_trainable_documents
from drawloom.components.data.packing.pieces import RowIndex

BRANCH = 21
RUN = 8192  # documents per run; fewer than BRANCH cubed, so there is always an empty row
MAX_RUNS = 2048  # runs that are packed at once


@component
class FirstFit(PackedRows):
    """
    Rows with whole documents, close to their original order.

    A document longer than a row is cut, and its rest is packed. Rows are slightly less full than with best-fit.
    """

    def build_row_index(self, lengths: np.ndarray, order: Permutation | None) -> RowIndex:
        """Group documents by first-fit; lengths: (documents,)."""
        return build_rows_from_documents(
            lengths, split_into_blocks(select_trainable_documents(lengths, order)), self.length, pack_by_first_fit
        )


def pack_by_first_fit(documents: np.ndarray, sizes: np.ndarray, capacity: int) -> GroupedItems:
    """Pack documents with these sizes, (items,), 1 to below capacity."""
    row_of, slot_of = np.empty(len(sizes), np.int64), np.empty(len(sizes), np.int64)
    rows = 0
    for start in range(0, len(sizes), RUN * MAX_RUNS):
        end = min(start + RUN * MAX_RUNS, len(sizes))
        run_rows, slot_of[start:end], used = _assign_rows_first_fit(sizes[start:end], capacity)
        row_of[start:end] = rows + run_rows
        rows += used
    return group_items_by_row(documents, RowAssignment(row_of, slot_of, rows))


def _assign_rows_first_fit(sizes: np.ndarray, capacity: int) -> RowAssignment:
    """Assign rows to items in up to `MAX_RUNS` runs."""
    runs = -(-len(sizes) // RUN)
    steps = min(RUN, len(sizes))
    # items of size 0 pad the last run, and change nothing
    padded = np.pad(sizes, (0, runs * steps - len(sizes))).reshape(runs, steps)
    rows = np.empty((runs, steps), np.int64)
    left = np.full((runs, BRANCH, BRANCH, BRANCH), capacity, np.min_scalar_type(capacity))
    # largest remaining capacity of each branch of the search tree, on two levels
    lower, upper = left.max(axis=3), left.max(axis=(2, 3))
    run = np.arange(runs)
    for step in range(steps):
        size = padded[:, step].astype(left.dtype)
        # On every level, the first branch with a row that has enough space.
        a = (upper >= size[:, None]).argmax(axis=1)
        b = (lower[run, a] >= size[:, None]).argmax(axis=1)
        c = (left[run, a, b] >= size[:, None]).argmax(axis=1)
        left[run, a, b, c] -= size
        lower[run, a, b] = left[run, a, b].max(axis=1)
        upper[run, a] = lower[run, a].max(axis=1)
        rows[:, step] = (a * BRANCH + b) * BRANCH + c
    used = (left.reshape(runs, -1) < capacity).sum(axis=1)
    rows += (np.cumsum(used) - used)[:, None]
    flat = rows.reshape(-1)[: len(sizes)]
    return RowAssignment(flat, _compute_slots_in_rows(flat), int(used.sum()))


def _compute_slots_in_rows(rows: np.ndarray) -> np.ndarray:
    """Return every item's slot in its row, (items,), by counting earlier items there."""
    by_row = np.argsort(rows, kind="stable")
    counts = np.bincount(rows)
    slots = np.empty(len(rows), np.int64)
    slots[by_row] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return slots
