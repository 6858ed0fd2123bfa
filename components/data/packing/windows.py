"""
Packing for evaluation: whole documents, or overlapping windows if a document is longer than a row.

The windows follow "Perplexity of fixed-length models" (transformers documentation): a window begins `stride` tokens
after the previous one, and only tokens not predicted by an earlier window have a weight.
"""

from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from drawloom import NodeView, Problem, between, component, setting
from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.packing.best_fit import pack_by_best_fit
from drawloom.components.data.packing.packed_rows import PackedRows, select_trainable_documents
from drawloom.components.data.packing.pieces import RowIndex, RowPiece
from drawloom.ports import MAX_LENGTH, Split, TokenBatch


@component
class Windows(PackedRows):
    """
    Rows for evaluation: whole documents, or sliding windows over longer ones, so every target counts once.

    Every target beyond a document's first window has at least `length - stride` tokens before it. `drawloom
    evaluate --corpus` evaluates such rows.
    """

    stride: int | None = setting(
        "window stride in tokens, at most `length`; default: half the length",
        default=None,
        check=between(1, MAX_LENGTH + 1),
    )

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield a problem if the stride is longer than a window, which would skip tokens."""
        yield from super().constraints(node)
        stride, length = node.settings["stride"], node.settings["length"]
        if stride is not None and stride > length:
            text = f"windows of {length} tokens that move by {stride} leave tokens out"
            yield node.problem("stride", text, f"write stride = {length} or less")

    def build_row_index(self, lengths: np.ndarray, order: Permutation | None) -> RowIndex:
        """Pack all documents' windows by best-fit-decreasing; lengths: (documents,)."""
        documents = select_trainable_documents(lengths, order)
        counts = count_windows(lengths[documents], self.length, self.window_stride)
        owners = np.repeat(documents, counts)
        # A window's index within its document, times the stride.
        first = self.window_stride * (np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts))
        last = np.minimum(first + self.length, lengths[owners])
        windows, counts_by_row = pack_by_best_fit(np.arange(len(owners)), last - first, self.length, order)
        return WindowIndex(
            documents=torch.from_numpy(owners[windows].astype(np.int64)),
            first=torch.from_numpy(first[windows].astype(np.int64)),
            last=torch.from_numpy(last[windows].astype(np.int64)),
            ends=torch.from_numpy(np.cumsum(counts_by_row, dtype=np.int64)),
        )

    def batch(self, split: Split, indices: Sequence[int]) -> TokenBatch:
        """Return the rows at these indices; targets predicted by an earlier window have weight 0."""
        batch, index = super().batch(split, indices), self._splits[split].index
        for weights, row in zip(batch.weights, indices, strict=True):
            begin = 0
            for piece in index.pieces(row):
                if piece.first:
                    weights[begin : begin + self.length - self.window_stride] = 0
                begin += piece.last - piece.first
        return batch

    @property
    def window_stride(self) -> int:
        """Window stride in tokens: the setting, or half the length."""
        return self.stride or self.length // 2


def count_windows(lengths: np.ndarray, length: int, stride: int) -> np.ndarray:
    """
    Count the windows over documents with at least two tokens, int64 (documents,); the last token is only a target.
    """
    return 1 + np.maximum(0, -(-(lengths.astype(np.int64) - 1 - length) // stride))


@attrs.frozen(eq=False)
class WindowIndex:
    """
    Index for windows, row after row: their documents, first tokens and ends, int64 (windows,); `ends`: row ends,
    (rows,).
    """

    documents: Tensor
    first: Tensor
    last: Tensor
    ends: Tensor

    @property
    def rows(self) -> int:
        return len(self.ends)

    @property
    def tokens(self) -> int:
        return int((self.last - self.first).sum())

    def pieces(self, row: int) -> list[RowPiece]:
        if not 0 <= row < self.rows:
            raise IndexError(f"there is no row {row} of {self.rows}")
        windows = slice(int(self.ends[row - 1]) if row else 0, int(self.ends[row]))
        columns = (tensor[windows].tolist() for tensor in (self.documents, self.first, self.last))
        return list(map(RowPiece._make, zip(*columns, strict=True)))

    def tokens_per_row(self) -> np.ndarray:
        ends = np.concatenate([[0], np.cumsum((self.last - self.first).numpy())])
        return np.diff(ends[self.ends.numpy()], prepend=0)
