"""Rows of whole documents: long ones fill rows of their own, and what is left of all is grouped."""

from collections.abc import Callable, Iterable, Iterator

import attrs
import numpy as np
import torch
from torch import Tensor

from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.packing.rows import RowPiece

Group = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray]]
"""
Takes documents and their sizes, both (items,), and the capacity of a row; gives documents by row,
(items,), and how many each row has, (rows,).
"""

BLOCK = 10**7  # documents that are grouped together: they bound memory


@attrs.frozen(eq=False)
class Groups:
    """
    The index of grouped documents.

    First come the rows that one document fills alone: `long` has those documents, int (documents,), and `full` counts
    their rows up to and with each, int64 (documents,). Then come the groups: `members` has their documents one group
    after another, int (members,), and `ends` where each group ends among them, int64 (groups,). `lengths` are those of
    all documents, int (documents,).
    """

    length: int
    tokens: int
    long: Tensor
    full: Tensor
    members: Tensor
    ends: Tensor
    lengths: Tensor

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self._full_rows + len(self.ends)

    @property
    def _full_rows(self) -> int:
        return int(self.full[-1]) if len(self.full) else 0

    def pieces(self, row: int) -> list[RowPiece]:
        """A part of a long document, or what a group has of its documents."""
        if not 0 <= row < self.rows:
            raise IndexError(f"there is no row {row} of {self.rows}")
        if row < self._full_rows:
            place = int(np.searchsorted(self.full.numpy(), row, side="right"))
            first = (row - (int(self.full[place - 1]) if place else 0)) * self.length
            return [RowPiece(int(self.long[place]), first, first + self.length)]
        group = row - self._full_rows
        begin, end = int(self.ends[group - 1]) if group else 0, int(self.ends[group])
        documents = self.members.numpy()[begin:end]
        held = zip(documents.tolist(), self.lengths.numpy()[documents].tolist(), strict=True)
        return [RowPiece(document, size - size % self.length, size) for document, size in held]

    def row_tokens(self) -> np.ndarray:
        """The tokens in each row, int64 (rows,)."""
        rests = self.lengths.numpy()[self.members.numpy()] % self.length
        ends = np.concatenate([[0], np.cumsum(rests, dtype=np.int64)])
        groups = np.diff(ends[self.ends.numpy()], prepend=0)
        return np.concatenate([np.full(self._full_rows, self.length), groups])


def group_documents(lengths: np.ndarray, blocks: Iterable[np.ndarray], length: int, group: Group) -> Groups:
    """
    The rows of documents; lengths: (documents,), of all; blocks: numbers of documents that are grouped together.

    What a long document leaves is a member of a group as a short document is; a single token, which has no target
    itself and is one in the row before, is left out.
    """
    # the least dtype with the longest document and a whole row; -128 would fit one byte, and 128 does not
    held = lengths.astype(np.min_scalar_type(-1 - int(lengths.max(initial=length))), copy=False)
    number = np.min_scalar_type(-max(1, len(lengths)))
    members, ends = [np.empty(0, number)], [np.empty(0, np.int64)]
    long, full = [np.empty(0, number)], [np.empty(0, np.int64)]
    tokens = done = 0
    for block in blocks:
        rests = held[block]
        fills = np.flatnonzero(rests >= length)
        long.append(block[fills])
        full.append(rests[fills] // length)
        rests[fills] %= length
        if (rests < 2).any():
            block, rests = block[rests >= 2], rests[rests >= 2]
        by_row, in_row = group(block, rests, length)
        members.append(by_row.astype(number))
        ends.append(done + np.cumsum(in_row))
        tokens += int(rests.sum(dtype=np.int64))
        done += len(by_row)
    in_full = np.cumsum(np.concatenate(full), dtype=np.int64)
    tokens += length * int(in_full[-1]) if len(in_full) else 0
    return Groups(
        length=length,
        tokens=tokens,
        long=torch.from_numpy(np.concatenate(long)),
        full=torch.from_numpy(in_full),
        members=torch.from_numpy(np.concatenate(members)),
        ends=torch.from_numpy(np.concatenate(ends)),
        lengths=torch.from_numpy(held),
    )


def in_order(lengths: np.ndarray, order: Permutation | None) -> np.ndarray:
    """The documents of at least two tokens, in an order, or else in that of their numbers; int (chosen,)."""
    documents = np.arange(len(lengths)) if order is None else order.all()
    return documents if (lengths >= 2).all() else documents[lengths[documents] >= 2]


def cut(order: np.ndarray) -> Iterator[np.ndarray]:
    """The numbers of documents in an order, (documents,), in blocks of BLOCK."""
    return (order[start : start + BLOCK] for start in range(0, len(order), BLOCK))


def gathered(items: np.ndarray, row_of: np.ndarray, place_of: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """
    Items by row, (items,), and how many each row has, (rows,).

    row_of, place_of: (items,), the row of each item, and its place there, from 0 without gaps.
    """
    counts = np.bincount(row_of, minlength=rows)
    starts = np.cumsum(counts) - counts
    by_row = np.empty_like(items)
    for begin in range(0, len(row_of), 2**20):
        part = slice(begin, begin + 2**20)
        by_row[starts[row_of[part]] + place_of[part]] = items[part]
    return by_row, counts
