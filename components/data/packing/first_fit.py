"""
First-fit packing: documents, in their order, go into the first row that has space for them.

Documents are packed in runs of `RUN`, and many runs at once: a step of numpy places one document of each.
"""

import numpy as np

from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.packing.groups import cut, gathered, group_documents, in_order
from drawloom.components.data.packing.packed_rows import PackedRows
from drawloom.components.data.packing.rows import RowIndex
from drawloom.graph import component

BRANCH = 21
RUN = 8192  # documents; fewer than BRANCH cubed, so that there is always an empty row
RUNS = 2048  # runs that are packed at once


@component
class FirstFit(PackedRows):
    """
    Rows of whole documents, near to the order in which they come.

    A document longer than a row is cut, and its rest packed. Rows are a little less full than by best-fit.
    """

    def index_of(self, lengths: np.ndarray, order: Permutation | None) -> RowIndex:
        """The groups of first-fit; lengths: (documents,)."""
        return group_documents(lengths, cut(in_order(lengths, order)), self.length, first_fit)


def first_fit(documents: np.ndarray, sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents by row, (items,), and how many each row has, (rows,); sizes: (items,), 1 to below capacity."""
    row_of, place_of = np.empty(len(sizes), np.int64), np.empty(len(sizes), np.int64)
    rows = 0
    for start in range(0, len(sizes), RUN * RUNS):
        end = min(start + RUN * RUNS, len(sizes))
        found, place_of[start:end], used = _fit_runs(sizes[start:end], capacity)
        row_of[start:end] = rows + found
        rows += used
    return gathered(documents, row_of, place_of, rows)


def _fit_runs(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray, int]:
    """The row of each item and its place there, both (items,), and the number of rows; up to `RUNS` runs of items."""
    runs = -(-len(sizes) // RUN)
    steps = min(RUN, len(sizes))
    # an item of size 0, which the last run may end with, changes nothing
    padded = np.pad(sizes, (0, runs * steps - len(sizes))).reshape(runs, steps)
    rows = np.empty((runs, steps), np.int64)
    left = np.full((runs, BRANCH, BRANCH, BRANCH), capacity, np.min_scalar_type(capacity))
    # the most that is left in any row of each branch, on two levels
    lower, upper = left.max(axis=3), left.max(axis=(2, 3))
    run = np.arange(runs)
    for step in range(steps):
        size = padded[:, step].astype(left.dtype)
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
    return flat, _places(flat), int(used.sum())


def _places(rows: np.ndarray) -> np.ndarray:
    """How many items before each one are in its row, (items,)."""
    by_row = np.argsort(rows, kind="stable")
    counts = np.bincount(rows)
    places = np.empty(len(rows), np.int64)
    places[by_row] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return places
