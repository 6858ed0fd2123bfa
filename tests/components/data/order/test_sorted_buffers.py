"""Rows sorted by length in a buffer; the RowOrder contract checks that all rows come once."""

from typing import Any

import numpy as np

from drawloom.components.data.order.permutation import Permutation
from drawloom.components.data.order.sorted_buffers import SortedBuffers
from drawloom.components.ports.data import MeasuredRows, RowSource
from drawloom.graph.testing import fake

TOKENS = np.random.default_rng(5).integers(1, 6, 70)
SOURCE = RowSource("b", 20, 50, 0, 1.0)


def test_packs_are_of_nearly_one_length_and_their_order_is_random(job: Any) -> None:
    """A buffer has the rows of the shuffled epoch, cut by length into packs; the packs themselves are shuffled."""
    order = SortedBuffers(lengths=fake(MeasuredRows, tokens_per_row=TOKENS), job=job, buffer=16, pack=4)
    for epoch in (0, 1):
        rows = order.rows_at(SOURCE, epoch, np.arange(50))
        shuffled = Permutation(job.seed, "rows b", epoch, 50).permute_all()
        for first in range(0, 50, 16):
            buffer = rows[first : first + 16]
            assert sorted(buffer) == sorted(shuffled[first : first + 16])
            by_length = sorted(shuffled[first : first + 16], key=lambda row: TOKENS[20 + row])  # stable, as the order
            packs = {tuple(buffer[start : start + 4].tolist()) for start in range(0, 16, 4)}
            if len(buffer) == 16:
                assert packs == {tuple(map(int, by_length[start : start + 4])) for start in range(0, 16, 4)}
    mean_lengths = [TOKENS[20 + rows[start : start + 4]].mean() for start in range(0, 48, 4)]
    assert mean_lengths != sorted(mean_lengths)
