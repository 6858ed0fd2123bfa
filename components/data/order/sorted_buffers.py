"""Shuffled rows, sorted by length within a buffer, so the rows of a microbatch have similar lengths."""

import numpy as np

from drawloom import between, component, internal, setting
from drawloom.components.data.order.permutation import Permutation
from drawloom.ports import MeasuredRows, RowSource, RunInfo


@component
class SortedBuffers:
    """
    Buffers with `buffer` shuffled rows, sorted by length, from which packs with `pack` rows are drawn at random.

    Rows of a pack have similar lengths, which saves padding where a batch is as long as its longest row. Rows of
    equal length stay in shuffled order. The order in a buffer depends only on (seed, source, epoch, buffer).
    """

    lengths: MeasuredRows
    job: RunInfo
    buffer: int = setting("number of rows to sort together", check=between(1, 1_000_000_001))
    pack: int = setting("number of rows that stay together, such as a microbatch", check=between(1, 1_000_000_001))
    _tokens: np.ndarray | None = internal(None)
    _last: dict[str, tuple[int, int, np.ndarray]] = internal(factory=dict)

    def rows_at(self, source: RowSource, epoch: int, positions: np.ndarray) -> np.ndarray:
        rows = np.empty(len(positions), np.int64)
        numbers = positions // self.buffer
        for number in np.unique(numbers).tolist():
            in_buffer = numbers == number
            rows[in_buffer] = self._get_sorted_buffer(source, epoch, number)[
                positions[in_buffer] - number * self.buffer
            ]
        return rows

    def _get_sorted_buffer(self, source: RowSource, epoch: int, buffer_number: int) -> np.ndarray:
        """Return a buffer's rows in final order; caches each source's last buffer."""
        if (cached := self._last.get(source.name)) is None or cached[:2] != (epoch, buffer_number):
            self._last[source.name] = cached = (
                epoch,
                buffer_number,
                self._sort_buffer_and_shuffle_packs(source, epoch, buffer_number),
            )
        return cached[2]

    def _sort_buffer_and_shuffle_packs(self, source: RowSource, epoch: int, buffer_number: int) -> np.ndarray:
        """Return a buffer's rows, as indices in the source: sorted by length, in shuffled packs."""
        if self._tokens is None:
            self._tokens = self.lengths.tokens_per_row("train")
        first = buffer_number * self.buffer
        positions = np.arange(first, min(first + self.buffer, source.rows))
        rows = Permutation(self.job.seed, f"rows {source.name}".strip(), epoch, source.rows).get_items_at(positions)
        rows = rows[np.argsort(self._tokens[source.first + rows], kind="stable")]
        packs = -(-len(rows) // self.pack)
        order = Permutation(self.job.seed, f"packs {buffer_number} {source.name}".strip(), epoch, packs).permute_all()
        return np.concatenate([rows[pack * self.pack : (pack + 1) * self.pack] for pack in order.tolist()])
