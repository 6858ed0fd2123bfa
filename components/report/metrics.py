"""
The curves of a run: `metrics.jsonl`, thinned so that a page of any run is small.

A series of many points is cut into buckets of equal counts; of each the mean, the least and the greatest value are
kept, so that no spike is lost.
"""

import json
import math
from array import array
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.storage.regular_file import open_regular_file

METRICS = "metrics.jsonl"
NO_METRICS = {"step", "format", "tokens", "crc32"}
MOST_SERIES = 64
MOST_NUMBERS = 40_000
"""Numbers in the curves of one run; the more series there are, the fewer points each keeps."""
MOST_POINTS, LEAST_POINTS = 1000, 100
LONGEST_LINE, LONGEST_NAME = 2**20, 200  # bytes and letters; a stranger's file may hold longer ones
LONGEST_STEP = 1e9  # seconds; what a stranger's file says beyond is cut
GREATEST = 1e300  # a greater value is left out: sums of such would overflow


@attrs.frozen
class MetricCurve:
    """A thinned series: `x` are steps; `low` and `high` are empty if every point is kept as it is."""

    x: list[int]
    y: list[float]
    low: list[float] = attrs.field(factory=list)
    high: list[float] = attrs.field(factory=list)


@attrs.define(eq=False)
class Column:
    """The values of one metric, and their steps."""

    steps: "array[int]" = attrs.field(factory=lambda: array("q"))
    values: "array[float]" = attrs.field(factory=lambda: array("d"))

    def thinned(self, points: int) -> MetricCurve:
        """At most this many points."""
        steps, values = np.asarray(self.steps), np.asarray(self.values)
        if len(steps) <= points:
            return MetricCurve(steps.tolist(), _short(values))
        starts = np.arange(0, len(steps), math.ceil(len(steps) / points))
        ends = np.append(starts[1:], len(steps))
        means = np.add.reduceat(values, starts) / (ends - starts)
        low, high = np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)
        return MetricCurve(steps[ends - 1].tolist(), _short(means), _short(low), _short(high))


@attrs.define(eq=False)
class Metrics:
    """Every metric of every step of a run; those beyond MOST_SERIES are left out."""

    columns: dict[str, Column] = attrs.field(factory=dict)
    steps: "array[int]" = attrs.field(factory=lambda: array("q"))
    left_out: set[str] = attrs.field(factory=set)
    _tokens: "array[float]" = attrs.field(factory=lambda: array("d"))  # so far, NaN where a row has none
    _speeds: "array[float]" = attrs.field(factory=lambda: array("d"))  # tokens per second, NaN likewise
    _step: int = -1  # of the last row; 0 is before training

    def put(self, row: dict[str, Any]) -> None:
        """Add a row; one that is not of a later step than those before is of no use in a curve, and left out."""
        step = row.get("step")
        if type(step) is not int or not self._step < step < 2**53:
            return
        self._step = step
        self.steps.append(step)
        # A run may have a million rows: what is done for each value is little.
        columns, tokens, speed = self.columns, math.nan, math.nan
        for name, value in row.items():
            if (type(value) is float or type(value) is int) and -GREATEST < value < GREATEST:
                if name == "tokens":
                    tokens = value
                elif name not in NO_METRICS and (column := columns.get(name) or self._column(name)) is not None:
                    column.steps.append(step)
                    column.values.append(value)
                    speed = value if name == "tokens_per_second" else speed
        self._tokens.append(tokens)
        self._speeds.append(speed)

    @cached_property
    def tokens(self) -> NDArray[np.float64]:
        """The tokens up to each step, (steps,); zeros if they are not known."""
        known = np.nan_to_num(np.asarray(self._tokens), nan=0.0)
        return np.maximum.accumulate(known) if len(known) else known

    @cached_property
    def seconds(self) -> NDArray[np.float64]:
        """Seconds in steps up to each, (steps,), without evaluations and pauses: tokens by tokens per second."""
        speeds = np.asarray(self._speeds)
        timed = speeds > 0  # NaN is not
        taken = np.divide(np.diff(self.tokens, prepend=0.0), speeds, out=np.zeros_like(speeds), where=timed)
        return np.cumsum(np.minimum(taken, LONGEST_STEP))

    def last(self, name: str) -> float | None:
        """The last value of a metric."""
        column = self.columns.get(name)
        return column.values[-1] if column else None

    def most(self, name: str) -> float | None:
        """The greatest value of a metric."""
        column = self.columns.get(name)
        return max(column.values) if column else None

    def least(self, name: str) -> tuple[float, int] | None:
        """The least value of a metric, and its first step."""
        column = self.columns.get(name)
        if not column:
            return None
        index = int(np.argmin(np.asarray(column.values)))
        return column.values[index], column.steps[index]

    def curves(self) -> dict[str, MetricCurve]:
        """Every series, thinned."""
        points = MOST_NUMBERS // (4 * max(1, len(self.columns)))
        points = min(MOST_POINTS, max(LEAST_POINTS, points))
        return {name: column.thinned(points) for name, column in self.columns.items()}

    def axes(self) -> dict[str, list[float]]:
        """Steps with the tokens and seconds up to each, at most MOST_POINTS; a page interpolates between them."""
        count = min(MOST_POINTS, len(self.steps))
        chosen = np.linspace(0, len(self.steps) - 1, count).round().astype(np.int64)
        axes: dict[str, list[float]] = {"step": [self.steps[index] for index in chosen]}
        for name, numbers in (("tokens", self.tokens), ("seconds", self.seconds)):
            if count and numbers[-1] > 0:
                axes[name] = _short(numbers[chosen], digits=9)
        return axes

    def _column(self, name: str) -> Column | None:
        """A new column for a metric, if there is space for one more."""
        if len(self.columns) >= MOST_SERIES or len(name) > LONGEST_NAME:
            self.left_out.add(name[:LONGEST_NAME])
            return None
        return self.columns.setdefault(name, Column())


def read_metrics(folder: Path) -> Metrics:
    """The metrics of a run folder, none if it has none; UserError if the file is a link or not a regular file."""
    metrics = Metrics()
    for line in lines_of(folder / METRICS):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # a crash has left the line incomplete, or a stranger wrote it
            continue
        if isinstance(row, dict):
            metrics.put(row)
    return metrics


def lines_of(path: Path) -> Iterator[bytes]:
    """The lines of a regular file, in pieces of at most LONGEST_LINE bytes; none if it is missing."""
    if not path.exists() and not path.is_symlink():
        return
    with open_regular_file(path) as file, open(file.descriptor, "rb", closefd=False) as lines:
        yield from iter(lambda: lines.readline(LONGEST_LINE), b"")


def _short(values: NDArray[np.float64], digits: int = 6) -> list[float]:
    """Rounded to digits that can be seen; integers where they are whole, which take fewer letters."""
    rounded = [float(f"{value:.{digits}g}") for value in values.tolist()]
    return [int(value) if value.is_integer() and abs(value) < 2**53 else value for value in rounded]
