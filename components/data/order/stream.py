"""
Endless training row stream: the row at each position.

The sources of a mixture take turns: the n-th row of a source, from 0, is due at (n + 1/2) / r, where r is the source's
share of rows, and rows are in the order of their due times. At every position each source has had its share to within
one row per other source, and the row at a position depends only on the shares. This schedule is Webster's method of
apportionment, and "stride scheduling" (Waldspurger and Weihl 1995).

Row shares are computed from weights, which are token shares: a source whose rows are half full gets twice the rows.
When a run resumes with other shares, a new segment of the stream begins, and each source continues with its next row.
"""

import logging
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import attrs
import numpy as np

from drawloom import UserError, internal
from drawloom.ports import MeasuredRows, PackedDataset, RowOrder, RowSource

log = logging.getLogger("drawloom.data")

WINDOW = 2**12  # positions per lookup: numpy takes the same time for one as for some hundreds
MISSING_ROW = -1  # a row of a source that is no longer in the mixture
UNIT = 2**48  # shares are integers in units of 1 / UNIT, so a checkpoint stores them exactly


def list_row_sources(rows: PackedDataset) -> Sequence[RowSource]:
    """Return the sources of the training rows; without a mixture, one source without a name."""
    if isinstance(rows, MeasuredRows):
        return rows.row_sources("train")
    count = rows.count_rows("train")
    return [RowSource("", 0, count, round(rows.fill_rate("train") * count * rows.length), 1.0)]


def convert_token_weights_to_shares(sources: Sequence[RowSource]) -> dict[str, int]:
    """
    Convert token weights to row shares by source, in units of 1 / UNIT; sources without weight are left out.

    Raises UserError for a source with a weight, but without rows.
    """
    used = [source for source in sources if source.weight]
    if empty := [source.name for source in used if not source.rows]:
        raise UserError(f"rows: the source {empty[0]} has no training text; add text, or leave it out of the mixture")
    rates = {source.name: source.weight * source.rows / max(source.tokens, 1) for source in used}
    total = sum(rates.values())
    return {name: max(1, round(rate / total * UNIT)) for name, rate in rates.items()}


class _DueRows(NamedTuple):
    """Sources and numbers of rows, both int64 (rows,), and the row count per source before them, int64 (sources,)."""

    earlier_by_source: np.ndarray
    sources: np.ndarray
    rows: np.ndarray


@attrs.frozen
class Segment:
    """Part of the row stream, from position `start` on, in which every source has a constant share of the rows."""

    start: int
    shares: Mapping[str, int]

    def locate_sources_and_rows(self, first_position: int, end_position: int) -> tuple[np.ndarray, np.ndarray]:
        """
        Return sources and row numbers at a range's positions, both int64 (positions,).

        Sources are indexes into the shares; positions and row numbers count from 0 at the segment's start.
        """
        due = self._list_rows_due_around_range(first_position, end_position)
        earlier = int(due.earlier_by_source.sum())
        bounds = slice(first_position - earlier, end_position - earlier)
        return due.sources[bounds], due.rows[bounds]

    def count_segment_rows_before(self, position: int) -> dict[str, int]:
        """Count the rows per source among the segment's first `position` rows."""
        earlier, sources, _ = self._list_rows_due_around_range(position, position)
        counts = earlier + np.bincount(sources[: position - int(earlier.sum())], minlength=len(earlier))
        return dict(zip(self.shares, counts.tolist(), strict=True))

    def _list_rows_due_around_range(self, first_position: int, end_position: int) -> _DueRows:
        """List the rows due in a range, and slightly before and after it, ordered by due time."""
        shares = np.array([*self.shares.values()], np.float64)
        # with k sources, t - k / 2 to t + k / 2 rows are due before time t
        begin, end = (
            _count_due_rows(shares, first_position - len(shares) - 1.0),
            _count_due_rows(shares, end_position + len(shares) + 1.0),
        )
        source = np.repeat(np.arange(len(shares)), end - begin)
        row = np.concatenate([np.arange(*bounds) for bounds in zip(begin.tolist(), end.tolist(), strict=True)])
        order = np.lexsort((source, (row + 0.5) * shares.sum() / shares[source]))
        return _DueRows(begin, source[order], row[order])


def _count_due_rows(shares: np.ndarray, time: float) -> np.ndarray:
    """Count the rows per source that are due before a time, int64 (sources,)."""
    total = shares.sum()
    counts: np.ndarray = np.maximum(np.floor(time * shares / total + 0.5), 0)
    # rounding may be off by one; correct it by the same division that sorts the rows
    counts -= (counts > 0) & ((counts - 0.5) * total / shares >= time)
    counts += (counts + 0.5) * total / shares < time
    return counts.astype(np.int64)


@attrs.define
class RowStream:
    """
    Row at each position; `segments` begin at increasing positions, the first one at 0.

    Rows have the numbers of the dataset: `source.first` plus the number in the source. The n-th row drawn from a source
    is at position n % source.rows in its epoch n // source.rows.
    """

    sources: Mapping[str, RowSource]
    order: RowOrder
    segments: list[Segment]
    _before: list[dict[str, int]] = internal()
    _window: int = internal(-1)
    _rows: np.ndarray = internal(factory=lambda: np.empty(0, np.int64))

    def __attrs_post_init__(self) -> None:
        """Count the rows per source before each segment."""
        self._before = [{}]
        for segment, following in pairwise(self.segments):
            counts = segment.count_segment_rows_before(following.start - segment.start)
            self._before.append(Counter(self._before[-1]) + Counter(counts))

    def rows_at(self, positions: Sequence[int]) -> list[int]:
        """Return the rows at these positions. Raises UserError for a source that is no longer in the mixture."""
        # Cache one window, because positions arrive in order; few rows get a short one, as a long one has many epochs.
        size = min(WINDOW, max(64, sum(source.rows for source in self.sources.values())))
        rows = []
        for position in positions:
            window, index = divmod(position, size)
            if window != self._window:
                self._rows = self._compute_rows(window * size, (window + 1) * size)
                self._window = window
            if (row := int(self._rows[index])) == MISSING_ROW:
                raise UserError(f"position {position} is from a source no longer in the mixture; add it with weight 0")
            rows.append(row)
        return rows

    def count_rows_before(self, position: int) -> dict[str, int]:
        """Count the rows per source before a position, including sources that later segments lack; no zeros."""
        number = self._find_segment_index(position)
        segment = self.segments[number]
        return Counter(self._before[number]) + Counter(segment.count_segment_rows_before(position - segment.start))

    def _compute_rows(self, first_position: int, end_position: int) -> np.ndarray:
        """
        Compute the rows at a range's positions, int64 (positions,); MISSING_ROW if a source is gone.
        """
        parts = []
        for number in range(self._find_segment_index(first_position), self._find_segment_index(end_position - 1) + 1):
            segment = self.segments[number]
            end = self.segments[number + 1].start if number + 1 < len(self.segments) else end_position
            source, row = segment.locate_sources_and_rows(
                max(first_position, segment.start) - segment.start, min(end_position, end) - segment.start
            )
            rows = np.empty(len(row), np.int64)
            for index, name in enumerate(segment.shares):
                is_from_source = source == index
                rows[is_from_source] = self._map_draws_to_rows(
                    name, self._before[number].get(name, 0) + row[is_from_source]
                )
            parts.append(rows)
        return np.concatenate(parts)

    def _map_draws_to_rows(self, source_name: str, draw_numbers: np.ndarray) -> np.ndarray:
        """Return a source's rows, int64 (rows,), given how many rows were drawn from it before every row."""
        numbers = np.full(len(draw_numbers), MISSING_ROW)
        if (source := self.sources.get(source_name)) is None or not source.rows:
            return numbers
        epochs = draw_numbers // source.rows
        for epoch in np.unique(epochs).tolist():
            in_epoch = epochs == epoch
            numbers[in_epoch] = self.order.rows_at(source, epoch, draw_numbers[in_epoch] - epoch * source.rows)
        return source.first + numbers

    def _find_segment_index(self, position: int) -> int:
        """Return the index for the segment with a position."""
        return bisect_right([segment.start for segment in self.segments], position) - 1


def build_row_stream(
    rows: PackedDataset, order: RowOrder, segments: list[Segment], next_step: int, position: int
) -> RowStream:
    """Return the earlier segments' stream; another begins at `next_step`'s position if the shares have changed."""
    sources = {source.name: source for source in list_row_sources(rows)}
    shares = convert_token_weights_to_shares([*sources.values()])
    if segments and segments[-1].shares != shares:
        log.warning("from step %d on, the shares of the mixture's sources differ from the earlier steps'", next_step)
        segments = [*(segment for segment in segments if segment.start < position), Segment(position, shares)]
    return RowStream(sources, order, segments or [Segment(0, shares)])
