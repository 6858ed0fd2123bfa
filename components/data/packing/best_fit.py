"""
Best-fit-decreasing packing: documents, from the longest to the shortest, go into the row that they fill best.

Documents of one length go into rows of one remaining capacity together, so the work is by pairs of length and capacity,
and not by document.
"""

from functools import partial

import numpy as np

from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.packing import groups
from drawloom.components.data.packing.packed_rows import PackedRows
from drawloom.components.data.packing.rows import RowIndex
from drawloom.graph import component

CACHED = 2**15  # items whose intermediate values fit a core's cache


@component
class BestFit(PackedRows):
    """
    Rows of whole documents, which hardly need padding.

    A document longer than a row is cut, and its rest packed. Rows come with the longest documents first, so the loader
    has to shuffle them, as it does by default.
    """

    def index_of(self, lengths: np.ndarray, order: Permutation | None) -> RowIndex:
        """The groups of best-fit-decreasing; lengths: (documents,)."""
        count = -(-len(lengths) // groups.BLOCK)
        # Each block is of documents from everywhere; among those of one length, chance decides which come first.
        blocks = (np.arange(number, len(lengths), count) for number in range(count))
        return groups.group_documents(lengths, blocks, self.length, partial(best_fit, order=order))


def best_fit(
    documents: np.ndarray, sizes: np.ndarray, capacity: int, order: Permutation | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """
    Documents by row, (items,), and how many each row has, (rows,); sizes: (items,), 1 to capacity.

    Documents of one size are in a random order, or in that of their numbers if there is none.
    """
    counts = np.bincount(sizes, minlength=capacity + 1)
    row_of, place_of, rows = _place(counts, len(sizes), capacity)
    return groups.gathered(_by_size(documents, sizes, capacity, order), row_of, place_of, rows)


def _by_size(documents: np.ndarray, sizes: np.ndarray, capacity: int, order: Permutation | None) -> np.ndarray:
    """The documents from the largest to the smallest, int64 (items,)."""
    # One number has it all, from its highest bits on: size, chance, document. Sorting it needs no second array.
    high, low = (np.uint64(int(most).bit_length()) for most in (capacity, documents.max(initial=0)))
    keys = np.zeros(len(documents), np.uint64)
    for begin in range(0, len(keys), CACHED):
        part = slice(begin, begin + CACHED)
        if order is not None:
            keys[part] = order.keys(documents[part]) >> (high + low) << low
        keys[part] |= documents[part].astype(np.uint64)
        keys[part] |= (capacity - sizes[part]).astype(np.uint64) << (np.uint64(64) - high)
    keys.sort()
    keys &= (np.uint64(1) << low) - np.uint64(1)
    return keys.astype(np.int64)


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
