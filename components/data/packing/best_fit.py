"""
Best-fit-decreasing packing: documents, from the longest to the shortest, go into the row that they fill best.

Documents of one length go into rows of one remaining capacity together, so the work is by pairs of length and capacity,
and not by document.
"""

import numpy as np

from drawloom.components.data.packing.groups import gathered, group_documents
from drawloom.components.data.packing.packed_rows import PackedRows
from drawloom.components.data.packing.rows import RowIndex
from drawloom.graph import component


@component
class BestFit(PackedRows):
    """
    Rows of whole documents, which hardly need padding.

    A document longer than a row is cut, and its rest packed. Rows come with the longest documents first, so the loader
    has to shuffle them, as it does by default.
    """

    def index_of(self, lengths: np.ndarray, order: np.ndarray) -> RowIndex:
        """The groups of best-fit-decreasing."""
        return group_documents(lengths, order, self.length, best_fit)


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Items by row, (items,), and items of each row, (rows,); sizes: (items,), 1 to capacity."""
    narrow = sizes.astype(np.uint16 if capacity < 1 << 16 else np.int64)
    by_size = np.argsort(narrow, kind="stable")  # numpy sorts 16 bits by radix
    counts = np.bincount(narrow, minlength=capacity + 1)
    row_of, place_of, rows = _place(counts, len(sizes), capacity)
    by_row, in_row = gathered(row_of, place_of, rows)
    # places count from the largest item
    return by_size[::-1][by_row], in_row


def _place(counts: np.ndarray, items: int, capacity: int) -> tuple[np.ndarray, np.ndarray, int]:
    """
    The row of each item, and its place in the row, for items in decreasing order of size; and the number of rows.

    counts: (capacity + 1,), the items of each size.
    """
    row_of, place_of = np.empty(items, np.int32), np.empty(items, np.int32)
    held = np.zeros(items, np.int32)  # items in each row; there are no more rows than items
    stacks: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # rows by what is left in them
    is_open = np.zeros(capacity + 1, bool)
    rows = done = 0
    for size in np.flatnonzero(counts)[::-1].tolist():
        waiting = int(counts[size])
        while waiting:
            left = size + int(is_open[size:].argmax())
            if not is_open[left]:
                left, needed = capacity, -(-waiting // (capacity // size))
                stacks[left].append(np.arange(rows, rows + needed, dtype=np.int32))
                rows += needed
            taken = stacks[left].pop()
            if len(taken) > waiting:
                stacks[left].append(taken[waiting:])
                taken = taken[:waiting]
            is_open[left] = bool(stacks[left])
            end = done + len(taken)
            row_of[done:end], place_of[done:end] = taken, held[taken]
            held[taken] += 1
            stacks[left - size].append(taken)
            is_open[left - size] = True
            done, waiting = end, waiting - len(taken)
    return row_of, place_of, rows
