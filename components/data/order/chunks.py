"""Order of rows in contiguous chunks that are read side by side."""

import numpy as np

from drawloom import between, component, setting
from drawloom.ports import RowSource


@component
class Chunks:
    """
    Contiguous chunks of a source's rows, which take turns row by row.

    With one chunk per data-parallel rank, and `deal = "in_turn"` in `run.batch`, each rank reads one chunk from
    start to end. Chunk sizes differ by at most one row; the surplus rows come last.
    """

    chunks: int = setting("number of chunks per source", check=between(1, 1_000_000_001))

    def rows_at(self, source: RowSource, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the rows at these positions, the same in every epoch, int64 (positions,)."""
        chunks = min(self.chunks, source.rows)
        size, longer = divmod(source.rows, chunks)  # the first chunks have one more row
        turn, chunk = np.divmod(positions, chunks)
        return chunk * size + np.minimum(chunk, longer) + turn
