"""Rows in contiguous chunks that are read side by side."""

import numpy as np

from drawloom.components.ports.data import RowSource
from drawloom.graph import between, component, setting


@component
class Chunks:
    """
    The rows of a source are divided into contiguous chunks, of which each takes its turn with its next row.

    With as many chunks as data-parallel ranks, and `deal = "in_turn"` in `run.batch`, each rank reads one chunk from
    its beginning to its end. Chunks differ by a row at most; a row that others have no equal of comes at the end.
    """

    chunks: int = setting(check=between(1, 1_000_000_001), doc="into how many chunks the rows of a source are divided")

    def rows_at(self, source: RowSource, epoch: int, places: np.ndarray) -> np.ndarray:
        """The rows at these places, the same in every epoch, int64 (places,)."""
        chunks = min(self.chunks, source.rows)
        size, longer = divmod(source.rows, chunks)  # the first chunks have a row more
        turn, chunk = np.divmod(places, chunks)
        return chunk * size + np.minimum(chunk, longer) + turn
