"""Rows in chunks; the RowOrder contract checks that all rows come once."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.data.order.chunks import Chunks
from drawloom.components.ports.data import RowSource
from drawloom.components.run.batch import GlobalBatch


@given(st.integers(1, 60), st.integers(1, 9))
def test_chunks_are_contiguous_and_take_turns(rows: int, chunks: int) -> None:
    """Chunks take turns at positions with their next rows; their lengths differ by one at most, and all rows occur."""
    order = Chunks(chunks=chunks).rows_at(RowSource("", 0, rows, rows, 1.0), 0, np.arange(rows)).tolist()
    rows_by_chunk = [order[first :: min(chunks, rows)] for first in range(min(chunks, rows))]
    assert [row for chunk in rows_by_chunk for row in chunk] == list(range(rows))
    assert max(map(len, rows_by_chunk)) - min(map(len, rows_by_chunk)) <= 1


def test_each_rank_reads_its_own_chunk(mesh_of: Any) -> None:
    """With rows dealt in turn, and as many chunks as ranks, a rank's rows are consecutive from step to step."""
    order, source = Chunks(chunks=2), RowSource("", 0, 40, 40, 1.0)
    for rank in range(2):
        mesh = mesh_of({"data_shard": 2}, {"data_shard": rank})
        batch = GlobalBatch(mesh=mesh, global_size=8, micro_size=2, deal="in_turn")
        places = [
            position for step in (1, 2, 3) for micro in batch.microbatch_row_positions(step) for position in micro
        ]
        assert order.rows_at(source, 0, np.array(places)).tolist() == [*range(20 * rank, 20 * rank + 12)]
