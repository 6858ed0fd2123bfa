"""Pair packing: both documents stay in the same row."""

import logging
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from drawloom import component, setting
from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.packing.best_fit import pack_by_best_fit
from drawloom.components.data.packing.groups import Groups
from drawloom.components.data.packing.packed_rows import PackedRows
from drawloom.components.data.packing.pieces import RowIndex
from drawloom.ports import Split, TokenBatch

log = logging.getLogger("drawloom.data")


@component
class Pairs(PackedRows):
    """
    Rows with whole pairs: documents 2n and 2n + 1 in the corpus follow one another, and are never cut.

    A pair longer than a row is dropped, with a warning. With `share_prompts` a batch has both answers' common beginning
    once, for `kernels.attention = "tree"`; the same pairs are in a row.
    """

    pairs: ClassVar[bool] = True

    share_prompts: bool = setting("whether a pair's common beginning is computed once", default=False)

    def batch(self, split: Split, indices: Sequence[int]) -> TokenBatch:
        batch = super().batch(split, indices)
        if not self.share_prompts:
            return batch
        from drawloom.components.data.packing.shared_pairs import share_prompts

        return share_prompts(batch)

    def build_row_index(self, lengths: np.ndarray, order: Permutation | None) -> RowIndex:
        """Group pairs by best-fit-decreasing; lengths: (documents,), with a pair's two lengths in succession."""
        first_documents = 2 * np.flatnonzero(lengths[::2] >= 2)
        sizes = lengths[first_documents] + lengths[first_documents + 1]
        if dropped := int((sizes > self.length).sum()):
            text = "%d of %d pairs are longer than a row of %d tokens, and are dropped; the longest has %d tokens"
            log.warning(text, dropped, len(sizes), self.length, sizes.max())
            first_documents, sizes = first_documents[sizes <= self.length], sizes[sizes <= self.length]
        by_row, in_row = pack_by_best_fit(first_documents, sizes, self.length, order)
        members = (by_row[:, None] + np.arange(2)).flatten()
        no_documents = torch.empty(0, dtype=torch.int64)
        return Groups(
            length=self.length,
            tokens=int(sizes.sum()),
            long=no_documents,
            full=no_documents,
            members=torch.from_numpy(members),
            ends=torch.from_numpy(2 * np.cumsum(in_row)),
            lengths=torch.from_numpy(lengths),
        )
