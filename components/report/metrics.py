"""
A run's curves: `metrics.jsonl`, thinned to keep pages small.

A long series is split into buckets with equal counts. A bucket keeps its mean, smallest and largest value, so spikes
remain visible.
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

from drawloom.components.storage.durable_files import open_untrusted_file

METRICS = "metrics.jsonl"
OTHER_KEYS = {"step", "format", "tokens", "crc32"}
MAX_SERIES = 64
MAX_NUMBERS = 40_000
"""Largest count of numbers in the curves of one run; with more series, a series keeps fewer points."""
MAX_POINTS, MIN_POINTS = 1000, 100
MAX_LINE_BYTES, MAX_NAME_LENGTH = 2**20, 200  # a stranger's file may exceed them
MAX_STEP_SECONDS = 1e9  # a stranger's file may exceed it
MAX_VALUE = 1e300  # larger values are left out, because their sums would overflow


@attrs.frozen
class MetricCurve:
    """Thinned series with values `y` at steps `x`; `low` and `high` are empty if all points are kept."""

    x: list[int]
    y: list[float]
    low: list[float] = attrs.field(factory=list)
    high: list[float] = attrs.field(factory=list)


@attrs.define(eq=False)
class Column:
    """One metric's values, and their steps."""

    steps: "array[int]" = attrs.field(factory=lambda: array("q"))
    values: "array[float]" = attrs.field(factory=lambda: array("d"))


@attrs.define(eq=False)
class Metrics:
    """A run's values for all metrics at all steps, without metrics beyond MAX_SERIES."""

    columns: dict[str, Column] = attrs.field(factory=dict)
    steps: "array[int]" = attrs.field(factory=lambda: array("q"))
    left_out: set[str] = attrs.field(factory=set)
    _tokens: "array[float]" = attrs.field(factory=lambda: array("d"))  # tokens up to a step; NaN if missing
    _speeds: "array[float]" = attrs.field(factory=lambda: array("d"))  # tokens per second; NaN if missing
    _step: int = -1  # of the last row; 0 is before training

    def add_row(self, row: dict[str, Any]) -> None:
        """Add a step's metrics; leave out a row whose step is not later than the previous one."""
        step = row.get("step")
        if type(step) is not int or not self._step < step < 2**53:
            return
        self._step = step
        self.steps.append(step)
        # A run may have a million rows, so the work per value must be small.
        columns, tokens, speed = self.columns, math.nan, math.nan
        for name, value in row.items():
            if (type(value) is float or type(value) is int) and -MAX_VALUE < value < MAX_VALUE:
                if name == "tokens":
                    tokens = value
                elif name not in OTHER_KEYS and (column := columns.get(name) or self._add_column(name)) is not None:
                    column.steps.append(step)
                    column.values.append(value)
                    speed = value if name == "tokens_per_second" else speed
        self._tokens.append(tokens)
        self._speeds.append(speed)

    @cached_property
    def total_tokens_by_step(self) -> NDArray[np.float64]:
        """Total tokens up to every step, (steps,); zeros if they are unknown."""
        known = np.nan_to_num(np.asarray(self._tokens), nan=0.0)
        return np.maximum.accumulate(known) if len(known) else known

    @cached_property
    def total_seconds_by_step(self) -> NDArray[np.float64]:
        """Cumulative step seconds, (steps,), from tokens and speeds: without evaluations and pauses."""
        speeds = np.asarray(self._speeds)
        is_timed = speeds > 0  # false for NaN
        seconds = np.divide(
            np.diff(self.total_tokens_by_step, prepend=0.0), speeds, out=np.zeros_like(speeds), where=is_timed
        )
        return np.cumsum(np.minimum(seconds, MAX_STEP_SECONDS))

    def last_value(self, name: str) -> float | None:
        """Return a metric's value at the last step; None if it is missing there, or not finite."""
        column = self.columns.get(name)
        return column.values[-1] if column and column.steps[-1] == self._step else None

    def largest_value(self, name: str) -> float | None:
        """Return a metric's largest value."""
        column = self.columns.get(name)
        return max(column.values) if column else None

    def smallest_value_and_step(self, name: str) -> tuple[float, int] | None:
        """Return a metric's smallest value, and its first step."""
        column = self.columns.get(name)
        if not column:
            return None
        index = int(np.argmin(np.asarray(column.values)))
        return column.values[index], column.steps[index]

    def thin_all_curves(self) -> dict[str, MetricCurve]:
        """Return all metrics' thinned curves, by name."""
        points = choose_max_points_per_curve(len(self.columns))
        return {
            name: thin_values_to_curve(np.asarray(column.steps), np.asarray(column.values), points)
            for name, column in self.columns.items()
        }

    def thin_all_axes(self) -> dict[str, list[float]]:
        """Return at most MAX_POINTS steps with their total tokens and seconds; the page interpolates between them."""
        count = min(MAX_POINTS, len(self.steps))
        chosen = np.linspace(0, len(self.steps) - 1, count).round().astype(np.int64)
        axes: dict[str, list[float]] = {"step": [self.steps[index] for index in chosen]}
        for name, numbers in (("tokens", self.total_tokens_by_step), ("seconds", self.total_seconds_by_step)):
            if count and numbers[-1] > 0:
                axes[name] = _round_for_json(numbers[chosen], digits=9)
        return axes

    def _add_column(self, name: str) -> Column | None:
        """Add a column for a metric; return None if there are too many or its name is too long."""
        if len(self.columns) >= MAX_SERIES or len(name) > MAX_NAME_LENGTH:
            self.left_out.add(name[:MAX_NAME_LENGTH])
            return None
        return self.columns.setdefault(name, Column())


def choose_max_points_per_curve(curve_count: int) -> int:
    """Return the maximum points per curve for a run with `curve_count` metrics."""
    return min(MAX_POINTS, max(MIN_POINTS, MAX_NUMBERS // (4 * max(1, curve_count))))


def thin_values_to_curve(
    steps: NDArray[np.int64],
    values: NDArray[np.float64],
    max_points: int,
    low: NDArray[np.float64] | None = None,
    high: NDArray[np.float64] | None = None,
) -> MetricCurve:
    """Return a curve with at most this many points, through values with a band from `low` to `high`, all (steps,)."""
    if len(steps) <= max_points:
        bounds = [[] if bound is None else _round_for_json(bound) for bound in (low, high)]
        return MetricCurve(steps.tolist(), _round_for_json(values), low=bounds[0], high=bounds[1])
    starts = np.arange(0, len(steps), math.ceil(len(steps) / max_points))
    ends = np.append(starts[1:], len(steps))
    means = np.add.reduceat(values, starts) / (ends - starts)
    smallest = np.minimum.reduceat(values if low is None else low, starts)
    largest = np.maximum.reduceat(values if high is None else high, starts)
    return MetricCurve(
        steps[ends - 1].tolist(), _round_for_json(means), _round_for_json(smallest), _round_for_json(largest)
    )


def read_metrics(folder: Path) -> Metrics:
    """Read the metrics in a run folder. Raises UserError if the file is a link or not a regular file."""
    metrics = Metrics()
    for line in read_lines(folder / METRICS):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # a crash left the line incomplete, or a stranger wrote the file
            continue
        if isinstance(row, dict):
            metrics.add_row(row)
    return metrics


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield a regular file's lines as bytes, longer ones in parts of MAX_LINE_BYTES; nothing if the file is missing."""
    if not path.exists() and not path.is_symlink():
        return
    with open_untrusted_file(path) as file, open(file.descriptor, "rb", closefd=False) as lines:
        yield from iter(lambda: lines.readline(MAX_LINE_BYTES), b"")


def _round_for_json(values: NDArray[np.float64], digits: int = 6) -> list[float]:
    """Round values to visible digits; whole numbers become integers, which are shorter in JSON."""
    rounded = [float(f"{value:.{digits}g}") for value in values.tolist()]
    return [int(value) if value.is_integer() and abs(value) < 2**53 else value for value in rounded]
