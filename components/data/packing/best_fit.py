"""
Best-fit-decreasing packing: documents, from longest to shortest, go into the row with the least sufficient space.

Equally long documents go together into rows with equal remaining capacity, so the work grows with the (length,
capacity) pairs, not with the documents.
"""

from functools import partial

import numpy as np

from drawloom import component
from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.packing import groups
from drawloom.components.data.packing.packed_rows import PackedRows
from drawloom.components.data.packing.pieces import RowIndex

CHUNK_ITEMS = 2**15  # items per step; intermediate values of that many fit a core's cache


@component
class BestFit(PackedRows):
    """
    Rows with whole documents with hardly any padding.

    A document longer than a row is cut, and its rest is packed. The first rows have the longest documents, so the
    loader must shuffle the rows, as it does by default.
    """

    def build_row_index(self, lengths: np.ndarray, order: Permutation | None) -> RowIndex:
        """Group documents by best-fit-decreasing; lengths: (documents,)."""
        count = -(-len(lengths) // groups.BLOCK)
        # Strided blocks sample the whole corpus; documents of equal length are in random order.
        blocks = (np.arange(number, len(lengths), count) for number in range(count))
        return groups.build_rows_from_documents(lengths, blocks, self.length, partial(pack_by_best_fit, order=order))


def pack_by_best_fit(
    documents: np.ndarray, sizes: np.ndarray, capacity: int, order: Permutation | None = None
) -> groups.GroupedItems:
    """
    Pack documents with these sizes, (items,), 1 to capacity.

    Equal sizes are in random order, or sorted by document number if `order` is None.
    """
    counts = np.bincount(sizes, minlength=capacity + 1)
    assignment = _assign_rows_best_fit(counts, len(sizes), capacity)
    return groups.group_items_by_row(_sort_by_size(documents, sizes, capacity, order), assignment)


def _sort_by_size(documents: np.ndarray, sizes: np.ndarray, capacity: int, order: Permutation | None) -> np.ndarray:
    """Sort documents by decreasing size, int64 (items,), with equal sizes ordered as in `pack_by_best_fit`."""
    # A key combines size, random bits and document, from the highest bits on, so sorting needs no second array.
    high, low = (np.uint64(int(bound).bit_length()) for bound in (capacity, documents.max(initial=0)))
    keys = np.zeros(len(documents), np.uint64)
    for begin in range(0, len(keys), CHUNK_ITEMS):
        part = slice(begin, begin + CHUNK_ITEMS)
        if order is not None:
            keys[part] = order.compute_random_keys(documents[part]) >> (high + low) << low
        keys[part] |= documents[part].astype(np.uint64)
        keys[part] |= (capacity - sizes[part]).astype(np.uint64) << (np.uint64(64) - high)
    keys.sort()
    keys &= (np.uint64(1) << low) - np.uint64(1)
    return keys.astype(np.int64)


def _assign_rows_best_fit(counts: np.ndarray, items: int, capacity: int) -> groups.RowAssignment:
    """Assign a row to every item, by decreasing size; counts: (capacity + 1,), items per size."""
    row_of, slot_of = np.empty(items, np.int32), np.empty(items, np.int32)
    filled = np.zeros(items, np.int32)  # items in each row; there are at most as many rows as items
    stacks: list[list[np.ndarray]] = [[] for _ in range(capacity + 1)]  # rows by remaining capacity
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
            targets = stacks[left].pop()
            if len(targets) > waiting:
                stacks[left].append(targets[waiting:])
                targets = targets[:waiting]
            is_open[left] = bool(stacks[left])
            end = done + len(targets)
            row_of[done:end], slot_of[done:end] = targets, filled[targets]
            filled[targets] += 1
            stacks[left - size].append(targets)
            is_open[left - size] = True
            done, waiting = end, waiting - len(targets)
    return groups.RowAssignment(row_of, slot_of, rows)
