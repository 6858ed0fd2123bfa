"""Rows of whole documents: long ones fill rows of their own, and what is left of all is grouped."""

from collections.abc import Callable

import attrs
import numpy as np
import torch
from torch import Tensor

from drawloom.components.data.packing.rows import Piece

Group = Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]
"""Takes sizes, (items,), and the capacity of a row; gives items by row, (items,), and items of each row, (rows,)."""

BLOCK = 10**7  # documents that are grouped together: they bound memory


@attrs.frozen(eq=False)
class Groups:
    """
    The index of grouped documents.

    First come the rows that one document fills alone: `long` has those documents, int (documents,), and `full` counts
    their rows up to and with each, int64 (documents,). Then come the groups: `members` has their documents one group
    after another, `sizes` the tokens of these documents, both int (documents,), and `ends` where each group ends among
    them, int64 (groups,).
    """

    length: int
    tokens: int
    long: Tensor
    full: Tensor
    members: Tensor
    sizes: Tensor
    ends: Tensor

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self._full_rows + len(self.ends)

    @property
    def _full_rows(self) -> int:
        return int(self.full[-1]) if len(self.full) else 0

    def pieces(self, row: int) -> list[Piece]:
        """A part of a long document, or what a group has of its documents."""
        if not 0 <= row < self.rows:
            raise IndexError(f"there is no row {row} of {self.rows}")
        if row < self._full_rows:
            place = int(np.searchsorted(self.full.numpy(), row, side="right"))
            first = (row - (int(self.full[place - 1]) if place else 0)) * self.length
            return [Piece(int(self.long[place]), first, first + self.length)]
        group = row - self._full_rows
        begin, end = int(self.ends[group - 1]) if group else 0, int(self.ends[group])
        held = zip(self.members[begin:end].tolist(), self.sizes[begin:end].tolist(), strict=True)
        return [Piece(document, size - size % self.length, size) for document, size in held]

    def row_tokens(self) -> np.ndarray:
        """The tokens in each row, int64 (rows,)."""
        ends = np.concatenate([[0], np.cumsum(self.sizes.numpy() % self.length, dtype=np.int64)])
        groups = np.diff(ends[self.ends.numpy()], prepend=0)
        return np.concatenate([np.full(self._full_rows, self.length), groups])


def group_documents(lengths: np.ndarray, order: np.ndarray, length: int, group: Group) -> Groups:
    """
    The rows of these documents, in order; lengths: (documents,), of all, order: the numbers of those to pack.

    What a long document leaves is a member of a group as a short document is; a single token, which has no target
    itself and is one in the row before, is left out.
    """
    width = np.min_scalar_type(-int(lengths.max(initial=1)))
    members, sizes = np.empty(len(order), order.dtype), np.empty(len(order), width)
    long, full, ends = [np.empty(0, order.dtype)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    tokens = done = 0
    for start in range(0, len(order), BLOCK):
        block = order[start : start + BLOCK]
        held = lengths[block]
        fills = np.flatnonzero(held >= length)
        rests = held.copy()
        rests[fills] %= length
        long.append(block[fills])
        full.append(held[fills] // length)
        if (rests < 2).any():
            block, held, rests = (each[rests >= 2] for each in (block, held, rests))
        by_row, in_row = group(rests, length)
        end = done + len(by_row)
        members[done:end], sizes[done:end] = block[by_row], held[by_row]
        ends.append(done + np.cumsum(in_row))
        tokens += int(rests.sum(dtype=np.int64))
        done = end
    in_full = np.cumsum(np.concatenate(full), dtype=np.int64)
    tokens += length * int(in_full[-1]) if len(in_full) else 0
    arrays = (np.concatenate(long), in_full, members[:done], sizes[:done], np.concatenate(ends))
    return Groups(length, tokens, *map(torch.from_numpy, arrays))


def gathered(row_of: np.ndarray, place_of: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Items by row, (items,), and items of each row, (rows,).

    row_of, place_of: (items,), the row of each item, and its place there, from 0 without gaps.
    """
    counts = np.bincount(row_of, minlength=rows)
    starts = np.cumsum(counts) - counts
    items = np.empty(len(row_of), np.int64)
    for begin in range(0, len(row_of), 2**20):
        part = slice(begin, begin + 2**20)
        items[starts[row_of[part]] + place_of[part]] = np.arange(begin, begin + len(row_of[part]))
    return items, counts
