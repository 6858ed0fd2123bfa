"""
The endless stream of training rows: which row is at each position.

The sources of a mixture take turns: the n-th row of a source, from 0, is due at (n + 1/2) / r, where r is its share of
rows, and rows come in the order in which they are due. So at every position each source has had its share to within a
row for each of the others, and what is at a position follows from nothing but the shares. This is the schedule of
Webster's method of apportionment, and of "stride scheduling" (Waldspurger and Weihl 1995).

Shares of rows follow from weights, which are shares of tokens: a source whose rows are half full has twice the rows.
When a run resumes with other shares, a new segment of the stream begins, and each source goes on with its next row.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise

import attrs
import numpy as np

from drawloom.components.ports.data import MeasuredRows, PackedDataset, RowOrder, RowSource
from drawloom.graph import UserError

WINDOW = 2**12  # positions that are looked up together: numpy costs the same for one as for some hundreds
GONE = -1  # the row of a source that a run had, and that its mixture has no more
UNIT = 2**48  # shares are whole numbers of such parts, so that a checkpoint holds them exactly


def row_sources(rows: PackedDataset) -> Sequence[RowSource]:
    """The sources of the training rows: those of a mixture, or one without a name."""
    if isinstance(rows, MeasuredRows):
        return rows.row_sources("train")
    count = rows.count("train")
    return [RowSource("", 0, count, round(rows.fill_rate("train") * count * rows.length), 1.0)]


def row_shares(sources: Sequence[RowSource]) -> dict[str, int]:
    """Each source's share of rows, for the weights of tokens; only of those that have a weight and rows."""
    rates = {each.name: each.weight * each.rows / max(each.tokens, 1) for each in sources if each.weight and each.rows}
    total = sum(rates.values())
    return {name: max(1, round(rate / total * UNIT)) for name, rate in rates.items()}


@attrs.frozen
class Segment:
    """A part of the stream with the same shares of rows, from a position on."""

    start: int
    shares: Mapping[str, int]

    def turns(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """
        The source at each position of a range, by its place among the shares, and its how manieth row in this segment.

        Positions and rows count from 0 at the segment's start; both int64 (last - first,).
        """
        begin, source, row = self._due_near(first, last)
        taken = slice(first - int(begin.sum()), last - int(begin.sum()))
        return source[taken], row[taken]

    def counts(self, position: int) -> dict[str, int]:
        """The rows of each source among the first `position` of this segment."""
        begin, source, _ = self._due_near(position, position)
        counts = begin + np.bincount(source[: position - int(begin.sum())], minlength=len(begin))
        return dict(zip(self.shares, counts.tolist(), strict=True))

    def _due_near(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How many rows of each source are due before a time a little earlier, and those due then, in order."""
        shares = np.array([*self.shares.values()], np.float64)
        # of k sources, from t - k / 2 to t + k / 2 rows are due before t
        begin, end = _due(shares, first - len(shares) - 1.0), _due(shares, last + len(shares) + 1.0)
        source = np.repeat(np.arange(len(shares)), end - begin)
        row = np.concatenate([np.arange(*bounds) for bounds in zip(begin.tolist(), end.tolist(), strict=True)])
        order = np.lexsort((source, (row + 0.5) * shares.sum() / shares[source]))
        return begin, source[order], row[order]


def _due(shares: np.ndarray, time: float) -> np.ndarray:
    """How many rows of each source are due before a time, int64 (sources,)."""
    total = shares.sum()
    counts: np.ndarray = np.maximum(np.floor(time * shares / total + 0.5), 0)
    # rounding may be off by one; what decides is the division by which rows are sorted
    counts -= (counts > 0) & ((counts - 0.5) * total / shares >= time)
    counts += (counts + 0.5) * total / shares < time
    return counts.astype(np.int64)


@attrs.define
class RowStream:
    """
    The row at each position; `segments` begin at rising positions, the first at 0.

    A row is numbered as in the data set: `source.first` plus its number in the source. The n-th row that is taken of a
    source is at place n % source.rows of its epoch n // source.rows.
    """

    sources: Mapping[str, RowSource]
    order: RowOrder
    segments: list[Segment]
    _before: list[dict[str, int]] = attrs.field(init=False)
    _window: int = attrs.field(init=False, default=-1)
    _rows: np.ndarray = attrs.field(init=False, factory=lambda: np.empty(0, np.int64))

    def __attrs_post_init__(self) -> None:
        """Count the rows of each source before each segment."""
        self._before = [{}]
        for segment, following in pairwise(self.segments):
            counts = segment.counts(following.start - segment.start)
            self._before.append(_sum(self._before[-1], counts))

    def rows(self, positions: Sequence[int]) -> list[int]:
        """The rows at these positions."""
        # one window is kept, as positions come in order; it is short for few rows, whose epochs are many in a long one
        size = min(WINDOW, max(64, sum(source.rows for source in self.sources.values())))
        rows = []
        for position in positions:
            window, place = divmod(position, size)
            if window != self._window:
                self._rows = self._between(window * size, (window + 1) * size)
                self._window = window
            if (row := int(self._rows[place])) == GONE:
                raise UserError(f"the row at position {position} is of a source that is no longer in the mixture")
            rows.append(row)
        return rows

    def taken(self, position: int) -> dict[str, int]:
        """The rows of each source before a position, also of sources that a later segment has no more."""
        number = self._segment(position)
        segment = self.segments[number]
        return _sum(self._before[number], segment.counts(position - segment.start))

    def _between(self, first: int, last: int) -> np.ndarray:
        parts = []
        for number in range(self._segment(first), self._segment(last - 1) + 1):
            segment = self.segments[number]
            end = self.segments[number + 1].start if number + 1 < len(self.segments) else last
            source, row = segment.turns(max(first, segment.start) - segment.start, min(last, end) - segment.start)
            rows = np.empty(len(row), np.int64)
            for place, name in enumerate(segment.shares):
                here = source == place
                rows[here] = self._rows_of(name, self._before[number].get(name, 0) + row[here])
            parts.append(rows)
        return np.concatenate(parts)

    def _rows_of(self, name: str, taken: np.ndarray) -> np.ndarray:
        """The rows of a source, of which these numbers of rows were taken before."""
        found = np.full(len(taken), GONE)
        if (source := self.sources.get(name)) is None or not source.rows:
            return found
        epochs = taken // source.rows
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            found[here] = self.order.rows_at(source, epoch, taken[here] - epoch * source.rows)
        return source.first + found

    def _segment(self, position: int) -> int:
        return bisect_right([segment.start for segment in self.segments], position) - 1


def _sum(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
