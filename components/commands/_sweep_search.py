"""
Points that a sweep chooses from finished runs, by Optuna's tree-structured Parzen estimator (TPE).

Bergstra et al. 2011, "Algorithms for hyper-parameter optimization", section 4. The sweep's folder is the state: it
has the points in search.json and the results in their runs, so a search resumes from them.
"""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.commands._sweep_points import (
    Axis,
    AxisInterval,
    Point,
    format_number,
    make_point,
    sample_random_points,
)
from drawloom.components.data.sources.files import import_optional_package
from drawloom.components.report.events import read_log
from drawloom.components.report.metrics import read_metrics
from drawloom.components.report.run_table import determine_run_state
from drawloom.components.storage.durable_files import replace_file
from drawloom.graph import UserError

FILE = "search.json"


def list_points_covering_axes(axes: Sequence[Axis], common: Sequence[str]) -> list[Point]:
    """Return points with every value in a list and both ends of every interval, each at least once."""
    ends = [
        [format_number(axis.interval.low), format_number(axis.interval.high)] if axis.interval else axis.values
        for axis in axes
    ]
    rows = [[values[min(row, len(values) - 1)] for values in ends] for row in range(max(map(len, ends)))]
    return [make_point([axis.key for axis in axes], row, common) for row in rows]


@attrs.frozen(eq=False)
class SweepSearch:
    """Search for the axes' values with the smallest `metric`, in the runs of a folder."""

    axes: Sequence[Axis]
    common: Sequence[str]
    folder: Path
    seed: int
    metric: str

    def read_points(self) -> list[Point]:
        """Return the points chosen so far. Raises UserError for a search over other axes, or for an invalid file."""
        return [self._make_point(values) for values in self._read_chosen_values()]

    def choose_and_record_point(self) -> Point:
        """Choose a point that differs from all others, and add it to the file. Raises UserError if there is none."""
        known = self._read_chosen_values()
        names = {self._make_point(values).name for values in known}
        point = self._make_point(values := self._suggest_values(known))
        if point.name in names:  # lists of values repeat themselves
            drawn = sample_random_points(self.axes, self.common, len(names) + 1, self.seed)
            point = next(point for point in drawn if point.name not in names)
            values = [word.partition("=")[2] for word in point.words[len(self.common) :]]
        self.folder.mkdir(parents=True, exist_ok=True)
        content = {"keys": [axis.key for axis in self.axes], "points": [*known, values]}
        replace_file(self.folder / FILE, json.dumps(content, indent=1, allow_nan=False).encode())
        return point

    def _suggest_values(self, known: Sequence[Sequence[str]]) -> list[str]:
        """Return the values that TPE suggests after the known points; a point without a result counts as bad."""
        optuna = import_optional_package("optuna", "pip install 'drawloom[search]'")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        distributions = {axis.key: _make_distribution(optuna, axis) for axis in self.axes}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=self.seed + len(known), constant_liar=True)
        study = optuna.create_study(sampler=sampler)
        states = optuna.trial.TrialState
        for values in known:
            if any(not _contains_value(axis, value) for axis, value in zip(self.axes, values, strict=True)):
                continue  # of an axis that had other values
            params = {
                axis.key: _parse_value_for_optuna(axis, value) for axis, value in zip(self.axes, values, strict=True)
            }
            loss = self._read_smallest_metric_if_finished(self._make_point(values))
            state = states.RUNNING if loss is None else states.COMPLETE
            study.add_trial(
                optuna.trial.create_trial(state=state, params=params, distributions=distributions, value=loss)
            )
        suggested = study.ask(distributions).params
        return [format_number(suggested[axis.key]) if axis.interval else suggested[axis.key] for axis in self.axes]

    def _read_smallest_metric_if_finished(self, point: Point) -> float | None:
        """Return a finished run's smallest value of the metric, else None. Raises UserError if it has no value."""
        run = self.folder / point.name
        if not run.is_dir() or determine_run_state(run, read_log(run)) != "finished":
            return None
        metrics = read_metrics(run)
        if (smallest := metrics.smallest_value_and_step(self.metric)) is None:
            names = ", ".join(sorted(metrics.columns))
            raise UserError(f"--metric {self.metric}: {run} does not have it; write one of {names}", 2)
        return smallest[0]

    def _read_chosen_values(self) -> list[list[str]]:
        """Return the points' values in the file, in the axes' order."""
        path, keys = self.folder / FILE, [axis.key for axis in self.axes]
        try:
            content = json.loads(path.read_text("utf-8"))
            searched, points = content["keys"], [[str(value) for value in point] for point in content["points"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path} can't be read: {error}; write another folder with --to", 2) from error
        if searched != keys:
            other = f"a search over {', '.join(map(str, searched))}, and this one is over {', '.join(keys)}"
            raise UserError(f"{self.folder} has {other}; write another folder with --to", 2)
        return points

    def _make_point(self, values: Sequence[str]) -> Point:
        return make_point([axis.key for axis in self.axes], values, self.common)


def _make_distribution(optuna: Any, axis: Axis) -> Any:
    """Return Optuna's distribution for an axis: numbers in an interval, or a list's texts."""
    if axis.interval is None:
        return optuna.distributions.CategoricalDistribution(axis.values)
    return optuna.distributions.FloatDistribution(
        axis.interval.low, axis.interval.high, log=axis.interval.scale == "log"
    )


def _contains_value(axis: Axis, text: str) -> bool:
    """Return whether an axis has a value, up to its text's rounding."""
    if axis.interval is None:
        return text in axis.values
    return abs(_clamp(axis.interval, float(text)) - float(text)) <= 1e-3 * abs(float(text))


def _parse_value_for_optuna(axis: Axis, text: str) -> str | float:
    """Return a value as Optuna's distribution has it."""
    return text if axis.interval is None else _clamp(axis.interval, float(text))


def _clamp(interval: AxisInterval, number: float) -> float:
    """Return the number in the interval that is nearest to `number`."""
    return min(max(number, interval.low), interval.high)
