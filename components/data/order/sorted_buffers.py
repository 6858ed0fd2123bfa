"""Shuffled rows, sorted by length within a buffer, so that the rows of a microbatch are of nearly one length."""

import attrs
import numpy as np

from drawloom.components.data.order.permutation import Permutation
from drawloom.components.ports.data import MeasuredRows, RowSource
from drawloom.components.ports.run import RunInfo
from drawloom.graph import between, component, setting


@component
class SortedBuffers:
    """
    Takes `buffer` rows of a shuffled epoch, sorts them by their tokens, and shuffles packs of `pack` of them.

    Rows of one pack are of nearly one length, which saves padding where a batch is as long as its longest row. Of rows
    with as many tokens the shuffled order remains. A buffer's order depends on (seed, source, epoch, buffer) alone.
    """

    lengths: MeasuredRows
    job: RunInfo
    buffer: int = setting(check=between(1, 1_000_000_001), doc="rows that are sorted together")
    pack: int = setting(check=between(1, 1_000_000_001), doc="rows that stay together, such as those of a microbatch")
    _tokens: np.ndarray | None = attrs.field(init=False, default=None)
    _last: dict[str, tuple[int, int, np.ndarray]] = attrs.field(init=False, factory=dict)

    def rows_at(self, source: RowSource, epoch: int, places: np.ndarray) -> np.ndarray:
        """The rows at these places of an epoch, int64 (places,)."""
        found = np.empty(len(places), np.int64)
        numbers = places // self.buffer
        for number in np.unique(numbers).tolist():
            here = numbers == number
            found[here] = self._buffer(source, epoch, number)[places[here] - number * self.buffer]
        return found

    def _buffer(self, source: RowSource, epoch: int, number: int) -> np.ndarray:
        """The rows of a buffer in their order; the last one of a source is kept."""
        if (held := self._last.get(source.name)) is None or held[:2] != (epoch, number):
            self._last[source.name] = held = (epoch, number, self._sorted(source, epoch, number))
        return held[2]

    def _sorted(self, source: RowSource, epoch: int, number: int) -> np.ndarray:
        if self._tokens is None:
            self._tokens = self.lengths.row_tokens("train")
        first = number * self.buffer
        places = np.arange(first, min(first + self.buffer, source.rows))
        rows = Permutation(self.job.seed, f"rows {source.name}".strip(), epoch, source.rows).at(places)
        rows = rows[np.argsort(self._tokens[source.first + rows], kind="stable")]
        packs = -(-len(rows) // self.pack)
        order = Permutation(self.job.seed, f"packs {number} {source.name}".strip(), epoch, packs).all()
        return np.concatenate([rows[pack * self.pack : (pack + 1) * self.pack] for pack in order.tolist()])
