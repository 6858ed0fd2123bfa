"""Rows with whole documents: long documents fill rows alone, and the rests are grouped."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import attrs
import numpy as np
import torch
from torch import Tensor

from drawloom.components.data.packing.pieces import RowPiece


class GroupedItems(NamedTuple):
    """Items row after row, (items,), and the item count per row, (rows,)."""

    items: np.ndarray
    counts_by_row: np.ndarray


class RowAssignment(NamedTuple):
    """Every item's row and slot in the row, both (items,), and the row count."""

    row_of: np.ndarray
    slot_of: np.ndarray
    row_count: int


PackFunction = Callable[[np.ndarray, np.ndarray, int], GroupedItems]
"""Function of documents and their sizes, both (items,), and a row's capacity: it groups the documents by row."""

BLOCK = 10**7  # documents that are grouped together; bounds memory


@attrs.frozen(eq=False)
class Groups:
    """
    Index for grouped documents.

    One document alone fills each of the first rows: `long` has these documents, int (documents,), and `full` their
    cumulative row counts, int64 (documents,). The other rows are groups: `members` has their documents, group after
    group, int (members,), and `ends` the group ends in `members`, int64 (groups,). `lengths`: int (documents,), for
    all documents.
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
        """Row count."""
        return self._long_document_row_count + len(self.ends)

    @property
    def _long_document_row_count(self) -> int:
        """Number of rows filled by a piece of one long document."""
        return int(self.full[-1]) if len(self.full) else 0

    def pieces(self, row: int) -> list[RowPiece]:
        """Return a row's pieces: one full piece from a long document, or the rests and short documents in a group."""
        if not 0 <= row < self.rows:
            raise IndexError(f"there is no row {row} of {self.rows}")
        if row < self._long_document_row_count:
            index = int(np.searchsorted(self.full.numpy(), row, side="right"))
            first = (row - (int(self.full[index - 1]) if index else 0)) * self.length
            return [RowPiece(int(self.long[index]), first, first + self.length)]
        group = row - self._long_document_row_count
        begin, end = int(self.ends[group - 1]) if group else 0, int(self.ends[group])
        documents = self.members.numpy()[begin:end]
        sizes = zip(documents.tolist(), self.lengths.numpy()[documents].tolist(), strict=True)
        return [RowPiece(document, size - size % self.length, size) for document, size in sizes]

    def tokens_per_row(self) -> np.ndarray:
        """Return the token count per row, int64 (rows,)."""
        rests = self.lengths.numpy()[self.members.numpy()] % self.length
        ends = np.concatenate([[0], np.cumsum(rests, dtype=np.int64)])
        groups = np.diff(ends[self.ends.numpy()], prepend=0)
        return np.concatenate([np.full(self._long_document_row_count, self.length), groups])


def build_rows_from_documents(
    lengths: np.ndarray, blocks: Iterable[np.ndarray], row_length: int, pack: PackFunction
) -> Groups:
    """
    Build rows from documents; lengths: (documents,), for all documents; blocks: document numbers, every block grouped
    by itself.

    A long document's rest becomes a group member, like a short document. A one-token rest is dropped, because it has no
    target and is itself the last target in the row before.
    """
    # the smallest dtype for the longest document and a whole row; -1 - n because -128 fits one byte and 128 does not
    sizes = lengths.astype(np.min_scalar_type(-1 - int(lengths.max(initial=row_length))), copy=False)
    number_dtype = np.min_scalar_type(-max(1, len(lengths)))
    members, ends = [np.empty(0, number_dtype)], [np.empty(0, np.int64)]
    long, full = [np.empty(0, number_dtype)], [np.empty(0, np.int64)]
    tokens = done = 0
    for block in blocks:
        rests = sizes[block]
        fills = np.flatnonzero(rests >= row_length)
        long.append(block[fills])
        full.append(rests[fills] // row_length)
        rests[fills] %= row_length
        if (rests < 2).any():
            block, rests = block[rests >= 2], rests[rests >= 2]
        by_row, in_row = pack(block, rests, row_length)
        members.append(by_row.astype(number_dtype))
        ends.append(done + np.cumsum(in_row))
        tokens += int(rests.sum(dtype=np.int64))
        done += len(by_row)
    in_full = np.cumsum(np.concatenate(full), dtype=np.int64)
    tokens += row_length * int(in_full[-1]) if len(in_full) else 0
    return Groups(
        length=row_length,
        tokens=tokens,
        long=torch.from_numpy(np.concatenate(long)),
        full=torch.from_numpy(in_full),
        members=torch.from_numpy(np.concatenate(members)),
        ends=torch.from_numpy(np.concatenate(ends)),
        lengths=torch.from_numpy(sizes),
    )


def split_into_blocks(documents: np.ndarray) -> Iterator[np.ndarray]:
    """Split document numbers, (documents,), into blocks with BLOCK documents; the last block may be shorter."""
    return (documents[start : start + BLOCK] for start in range(0, len(documents), BLOCK))


def group_items_by_row(items: np.ndarray, assignment: RowAssignment) -> GroupedItems:
    """Group items, (items,), by their assigned rows; slots in a row are from 0 without gaps."""
    row_of, slot_of, rows = assignment
    counts = np.bincount(row_of, minlength=rows)
    starts = np.cumsum(counts) - counts
    by_row = np.empty_like(items)
    for begin in range(0, len(row_of), 2**20):
        part = slice(begin, begin + 2**20)
        by_row[starts[row_of[part]] + slot_of[part]] = items[part]
    return GroupedItems(by_row, counts)
