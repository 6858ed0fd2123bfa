"""Runs of one recipe with several seeds as a group: means, spreads and mean curves."""

import math
import statistics
from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.report.metrics import Column, MetricCurve, choose_max_points_per_curve, thin_values_to_curve
from drawloom.components.report.run_record import RunRecord, list_differing_settings, parse_recipe_settings
from drawloom.graph.cli.command import output, output_class

MAX_NAMED_SETTINGS = 3
"""Settings in the name of a group."""
MAX_NAMED_VALUE = 24


@output_class
class SeedSpread:
    """Mean over a group's seeds, and the sample standard deviation."""

    mean: float = output("mean over the seeds")
    deviation: float | None = output("sample standard deviation; null for one seed")

    @classmethod
    def from_values(cls, values: Sequence[float | None]) -> "SeedSpread | None":
        """Return the spread of one value, or of several; None if one is missing."""
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

    def __str__(self) -> str:
        if self.deviation is None:
            return f"{self.mean:.4f}"
        return f"{self.mean:.4f} ± {self.deviation:.2g}"


@attrs.frozen(eq=False)
class SeedGroup:
    """Runs whose recipes differ in seeds alone. `settings` are this group's values where groups differ."""

    name: str
    runs: Sequence[RunRecord]
    settings: dict[str, str]

    def spread_at_step(self, metric: str, step: int) -> SeedSpread | None:
        """Return a metric's spread at a step, or None if a run lacks it."""
        values = [find_value_at_step(run.metrics.columns.get(metric), step) for run in self.runs]
        return SeedSpread.from_values(values)

    def spread_of_best_values(self, metric: str) -> SeedSpread | None:
        """Return the spread of a metric's smallest values, or None if a run lacks it."""
        values = [run.metrics.smallest_value_and_step(metric) for run in self.runs]
        return SeedSpread.from_values([value and value[0] for value in values])

    def curves_over_seeds(self) -> dict[str, MetricCurve]:
        """
        Return all metrics' curves by name.

        Over several seeds: the mean at their common steps, with a band from the smallest to the largest value.
        """
        first = self.runs[0].metrics
        if len(self.runs) == 1:
            return first.thin_all_curves()
        points = choose_max_points_per_curve(len(first.columns))
        return {
            name: curve for name in first.columns if (curve := self._mean_curve_with_band(name, points)) is not None
        }

    def _mean_curve_with_band(self, metric: str, max_points: int) -> MetricCurve | None:
        """Return a metric's mean over the runs with a band, at common steps; None if a run lacks the metric."""
        columns = [run.metrics.columns.get(metric) for run in self.runs]
        known = [column for column in columns if column is not None]
        steps = find_common_steps(known)
        if len(known) < len(columns) or not len(steps):
            return None
        values = np.stack(
            [np.asarray(column.values)[np.searchsorted(np.asarray(column.steps), steps)] for column in known]
        )
        return thin_values_to_curve(steps, values.mean(0), max_points, low=values.min(0), high=values.max(0))


def group_runs_by_settings(runs: Sequence[RunRecord]) -> list[SeedGroup]:
    """Return the groups, ordered by their first runs. A run without a recipe is its own group."""
    grouped: dict[object, list[RunRecord]] = {}
    settings: dict[object, dict[str, str]] = {}
    for number, run in enumerate(runs):
        known = {
            key: value for key, value in parse_recipe_settings(run.recipe).items() if key.rpartition(".")[2] != "seed"
        }
        identity: object = frozenset(known.items()) if known else number
        grouped.setdefault(identity, []).append(run)
        settings[identity] = known
    differing = list_differing_settings(settings.values())
    chosen = {identity: {key: known.get(key, "") for key in differing} for identity, known in settings.items()}
    names = [_name_group(members, chosen[identity]) for identity, members in grouped.items()]
    return [
        SeedGroup(name if names.count(name) == 1 else members[0].name, members, chosen[identity])
        for name, (identity, members) in zip(names, grouped.items(), strict=True)
    ]


def find_last_common_step(groups: Sequence[SeedGroup], metric: str) -> int | None:
    """Return the last step that all runs have in the groups in which every run has the metric, or None."""
    by_group = [[run.metrics.columns.get(metric) for run in group.runs] for group in groups]
    known = [column for columns in by_group for column in columns if column is not None and None not in columns]
    return int(steps[-1]) if known and len(steps := find_common_steps(known)) else None


def find_common_steps(columns: Sequence[Column]) -> NDArray[np.int64]:
    """Return the steps common to all columns, ascending."""
    steps = np.asarray(columns[0].steps, dtype=np.int64)
    for column in columns[1:]:
        steps = np.intersect1d(steps, np.asarray(column.steps, dtype=np.int64), assume_unique=True)
    return steps


def find_value_at_step(column: Column | None, step: int) -> float | None:
    """Return a column's value at a step, or None."""
    if column is None:
        return None
    index = int(np.searchsorted(np.asarray(column.steps), step))
    has_step = index < len(column.steps) and column.steps[index] == step
    return column.values[index] if has_step and math.isfinite(column.values[index]) else None


def _name_group(runs: Sequence[RunRecord], settings: dict[str, str]) -> str:
    """Return a group's name: its settings if there are a few, otherwise its first run's name."""
    if len(runs) == 1 or not 0 < len(settings) <= MAX_NAMED_SETTINGS:
        return runs[0].name
    values = (value[:MAX_NAMED_VALUE] or "absent" for value in settings.values())
    return ", ".join(f"{label}={value}" for label, value in zip(shorten_keys([*settings]), values, strict=True))


def shorten_keys(keys: Sequence[str]) -> list[str]:
    """Return the last parts of keys, or the whole keys where several end alike."""
    short = [key.rpartition(".")[2] for key in keys]
    return [last if short.count(last) == 1 else key for key, last in zip(keys, short, strict=True)]
