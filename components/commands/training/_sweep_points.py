"""
The points of a sweep, each with a name and its words: a grid, random points, a list, or points that a search chooses.

Axes are words `node.key=a,b,c`, `node.key=0..3` or `node.key=1e-4..1e-2:log`, and tables of a TOML file.
"""

import itertools
import json
import math
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import tomli

from drawloom import UserError
from drawloom.components.data.sources.files import import_optional_package
from drawloom.components.report.events import read_log
from drawloom.components.report.metrics import read_metrics
from drawloom.components.report.run_record import determine_run_state
from drawloom.components.report.seed_groups import shorten_keys
from drawloom.components.storage.durable_files import replace_file
from drawloom.graph.recipe.overrides import read_overrides
from drawloom.graph.toml.emit import dump_key, dump_toml

RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)")
NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
INTERVAL = re.compile(rf"({NUMBER})\.\.({NUMBER})(?::(\w+))?")
SCALES = ("log", "uniform")
MAX_POINTS = 10_000
MAX_NAME_LENGTH = 200  # file names have at most 255 bytes
MAX_DRAWS = 100  # for each random point, if values repeat
NAMES = ("run.name", "run.folder")
OPENING, CLOSING, QUOTES = "[{(", "]})", "\"'"


@attrs.frozen
class Axis:
    """A setting's key, and its values as TOML texts."""

    key: str
    values: Sequence[str]

    def sample_value_text(self, generator: random.Random) -> str:
        """Draw a value."""
        return generator.choice(self.values)

    def find_value(self, text: str) -> Any:
        """Return the axis's value for a text in a file; None if the axis doesn't have it."""
        return text if text in self.values else None

    def make_distribution(self, distributions: Any) -> Any:
        """Return a distribution over the values, made with Optuna's module."""
        return distributions.CategoricalDistribution(self.values)


@attrs.frozen
class AxisInterval(Axis):
    """Numbers from `low` to `high`, its `values`; drawn uniformly or, on the log scale, with a uniform logarithm."""

    low: float
    high: float
    scale: str

    def sample_value_text(self, generator: random.Random) -> str:
        if self.scale == "uniform":
            return format_number(generator.uniform(self.low, self.high))
        return format_number(math.exp(generator.uniform(math.log(self.low), math.log(self.high))))

    def find_value(self, text: str) -> float | None:
        value = min(max(number := float(text), self.low), self.high)
        return value if abs(value - number) <= 1e-3 * abs(number) else None  # the text is rounded

    def make_distribution(self, distributions: Any) -> Any:
        return distributions.FloatDistribution(self.low, self.high, log=self.scale == "log")


def format_number(number: float) -> str:
    """Return a number as text with four significant digits."""
    return f"{number:.4g}"


@attrs.frozen
class Point:
    """One run of a sweep: a name made from its values, and the words `node.key=value` that override the recipe."""

    name: str
    words: list[str]

    def make_run_words(self, folder: Path) -> list[str]:
        """Return the words of the run, in a folder below `folder`."""
        return [*self.words, f"run.name={self.name}", f"run.folder={folder / self.name}"]


def make_sweep_points(
    words: Sequence[str], file: Path | None = None, count: int | None = None, seed: int = 0
) -> list[Point]:
    """
    Return the grid over all axes, the last one varying first, or `count` random points, or the points of a file.

    Words with one value apply to every point. The same seed gives the same points, and a larger count adds some. Raises
    UserError if nothing varies, if a value is repeated, or if there are too many points.
    """
    table = {} if file is None else _read_axes_file(file)
    axes, common_words = _split_axes_from_common_words(words, table, str(file))
    if listed := table.get("points"):
        points = _read_listed_points(listed, str(file), axes, common_words)
    elif count is not None:
        return sample_random_points(_require_axes(axes), common_words, count, seed)
    else:
        keys = [axis.key for axis in _require_axes(axes)]
        points = [make_point(keys, values, common_words) for values in _combine_values(axes)]
    names = [point.name for point in points]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"two points of the sweep are named {repeated[0]}; write every value once", 2)
    return points


def read_axes_and_common_words(words: Sequence[str], file: Path | None = None) -> tuple[list[Axis], list[str]]:
    """Return the axes in words and in a file's [axes], and the words for all points. Raises UserError without axes."""
    table = {} if file is None else _read_axes_file(file)
    if "points" in table:
        raise UserError(f"{file} lists [[points]], and a search chooses them; write [axes]", 2)
    axes, common_words = _split_axes_from_common_words(words, table, str(file))
    return _require_axes(axes), common_words


def _split_axes_from_common_words(
    words: Sequence[str], table: Mapping[str, Any], file: str
) -> tuple[list[Axis], list[str]]:
    """Return the axes with several values, and words for the others. Raises UserError for a repeated axis."""
    given = [*_read_axes(table.get("axes", {}), file), *map(_parse_axis, words)]
    axes = [axis for axis in given if len(axis.values) > 1]
    keys = [axis.key for axis in axes]
    if named := [key for key in keys if key in NAMES]:
        raise UserError(f"{named[0]} can't vary: the sweep names its runs by the other values; write --to FOLDER", 2)
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise UserError(f"{repeated[0]} is given twice; write all of its values in one word", 2)
    return axes, [f"{axis.key}={value}" for axis in given if len(axis.values) == 1 for value in axis.values]


def _require_axes(axes: list[Axis]) -> list[Axis]:
    """Return the axes. Raises UserError if there are none."""
    if not axes:
        raise UserError("there is nothing to vary; write several values, such as optimizer.lr=1e-3,3e-4", 2)
    return axes


def _combine_values(axes: Sequence[Axis]) -> Iterator[tuple[str, ...]]:
    """Return all combinations of the axes' values. Raises UserError for an interval, or for too many points."""
    for axis in axes:
        if isinstance(axis, AxisInterval):
            raise UserError(
                f"{axis.key} is an interval, and a grid needs single values; write --random 20 for 20 random points", 2
            )
    _check_point_count(math.prod(len(axis.values) for axis in axes))
    return itertools.product(*(axis.values for axis in axes))


def _check_point_count(count: int) -> None:
    """Raise UserError if a sweep has more than MAX_POINTS points."""
    if count > MAX_POINTS:
        raise UserError(
            f"the sweep has {count:,} points, and at most {MAX_POINTS:,} are possible; write fewer values", 2
        )


def sample_random_points(axes: Sequence[Axis], common: Sequence[str], count: int, seed: int) -> list[Point]:
    """Draw `count` different points; `common` are words for all points. Raises UserError if the axes have too few."""
    _check_point_count(count)
    generator, points = random.Random(seed), dict[str, Point]()
    for _ in range(count * MAX_DRAWS):
        point = make_point([axis.key for axis in axes], [axis.sample_value_text(generator) for axis in axes], common)
        points.setdefault(point.name, point)
        if len(points) == count:
            return list(points.values())
    raise UserError(f"the axes have only about {len(points)} of {count} points; write fewer, or a grid", 2)


def _read_listed_points(listed: Any, file: str, axes: Sequence[Axis], common: Sequence[str]) -> list[Point]:
    """Return the points from [[points]] in a file; names contain only differing keys."""
    if axes:
        raise UserError(f"{axes[0].key} has several values, and {file} lists [[points]]; write one or the other", 2)
    if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        raise UserError(f"{file}: points is not a list of tables; write [[points]] before every point", 2)
    _check_point_count(len(listed))
    rows = [{key: dump_toml(value) for key, value in _flatten_table(table)} for table in listed]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    differing = [key for key in keys if len({row.get(key) for row in rows}) > 1]
    return [
        make_point(
            [key for key in differing if key in row],
            [row[key] for key in differing if key in row],
            [*common, *(f"{key}={value}" for key, value in row.items() if key not in differing)],
        )
        for row in rows
    ]


def _read_axes_file(file: Path) -> dict[str, Any]:
    """Read the tables [axes] and [[points]]. Raises UserError for other tables, or if the file can't be read."""
    try:
        table = tomli.loads(file.read_text("utf-8"))
    except OSError as error:
        raise UserError(f"--axes {file}: {error.strerror}; name a TOML file", 2) from error
    except ValueError as error:
        raise UserError(f"--axes {file} is not TOML: {error}", 2) from error
    if unknown := table.keys() - {"axes", "points"}:
        raise UserError(f"--axes {file}: there is no table [{min(unknown)}]; write [axes] or [[points]]", 2)
    return table


def _read_axes(table: Mapping[str, Any], file: str) -> Iterator[Axis]:
    """Yield the axes of a table: a list of values, a range as a string, an interval, or one value."""
    for key, value in _flatten_table(table):
        match value:
            case list():
                yield Axis(key, [dump_toml(item) for item in value])
            case {"low": int() | float() as low, "high": int() | float() as high, "scale": str(scale)}:
                yield _parse_interval(key, f"{file}: {key}", low, high, scale)
            case str() if RANGE.fullmatch(value) or INTERVAL.fullmatch(value):
                yield _parse_axis(f"{key}={value}")
            case _:
                yield Axis(key, [dump_toml(value)])


def _flatten_table(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """
    Yield dotted keys and values of nested tables; an interval's table stays whole.

    `"optimizer.lr" = [...]` is taken as `optimizer.lr = [...]`: no node has a dot in its name.
    """
    for name, value in table.items():
        key = f"{prefix}{dump_key(name)}" if prefix else ".".join(map(dump_key, name.split(".")))
        if isinstance(value, dict) and not {"low", "high"} <= value.keys():
            yield from _flatten_table(value, f"{key}.")
        else:
            yield key, value


def _parse_axis(word: str) -> Axis:
    """Parse a word: node.key= and values separated by commas, a range, or an interval."""
    key, _, text = word.partition("=")
    match = INTERVAL.fullmatch(text.strip())
    if match and not RANGE.fullmatch(text.strip()):
        return _parse_interval(key, word, float(match[1]), float(match[2]), match[3])
    return Axis(key, [value for part in _split_values(text) for value in _expand_range(key, part)])


def _parse_interval(key: str, word: str, low: float, high: float, scale: str | None) -> AxisInterval:
    """Return an interval. Raises UserError without a known scale, or unless low < high."""
    if scale is None:
        raise UserError(f"{word} is an interval without a scale; write {word}:log or {word}:uniform", 2)
    if scale not in SCALES:
        raise UserError(f"{word}: the scale is {scale!r}; write {' or '.join(SCALES)}", 2)
    if not low < high or (scale == "log" and low <= 0):
        above = " above 0" if scale == "log" else ""
        raise UserError(f"{word} is not an interval; write a smaller number{above} first, such as 1e-4..1e-2:log", 2)
    return AxisInterval(key, [format_number(low), format_number(high)], low, high, scale)


def _split_values(text: str) -> list[str]:
    """Split a text at the commas outside brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in QUOTES:
            quote = character
        else:
            depth += (character in OPENING) - (character in CLOSING)
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _expand_range(key: str, text: str) -> list[str]:
    """Return the integers in a range such as 0..2, including both ends; for other texts, only the text."""
    if not (match := RANGE.fullmatch(text.strip())):
        return [text.strip()]
    first, last = int(match[1]), int(match[2])
    if last < first:
        raise UserError(f"{key}={text} is not a range; write the smaller number first, such as 0..2", 2)
    if last >= first + MAX_POINTS:
        count = f"{last - first + 1:,} values, and at most {MAX_POINTS:,} are possible"
        raise UserError(f"{key}={text} has {count}; write a shorter range", 2)
    return [str(number) for number in range(first, last + 1)]


def make_point(keys: Sequence[str], values: Sequence[str], common: Sequence[str]) -> Point:
    """Return a point from keys and values, with `common` words. Raises UserError if its name is too long."""
    words = [f"{key}={value}" for key, value in zip(keys, values, strict=True)]
    name = ",".join(
        f"{label}={_format_value_for_file_name(word)}" for label, word in zip(shorten_keys(keys), words, strict=True)
    )
    if len(name) > MAX_NAME_LENGTH:
        raise UserError(
            f"the name of the point {name[:40]}... is too long for a folder; write overlays with --overlay", 2
        )
    return Point(name, [*common, *words])


def _format_value_for_file_name(word: str) -> str:
    """Return the value in `key=value` for a file name; equal values, like 1e-3 and 0.001, give the same text."""
    value = read_overrides([word])
    while isinstance(value, dict) and len(value) == 1:
        [value] = value.values()
    text = value if isinstance(value, str) else dump_toml(value)
    return re.sub(r"[^\w.+-]+", "_", text)


FILE = "search.json"


def list_points_covering_axes(axes: Sequence[Axis], common: Sequence[str]) -> list[Point]:
    """Return points with every value in a list and both ends of every interval, each at least once."""
    rows = [
        [axis.values[min(row, len(axis.values) - 1)] for axis in axes]
        for row in range(max(len(axis.values) for axis in axes))
    ]
    return [make_point([axis.key for axis in axes], row, common) for row in rows]


@attrs.frozen(eq=False)
class SweepSearch:
    """
    Search for the axes' values with the smallest `metric`, by Optuna's tree-structured Parzen estimator (TPE).

    Bergstra et al. 2011, "Algorithms for hyper-parameter optimization", section 4. The sweep's folder is the state: it
    has the points in search.json and the results in their runs, so a search resumes from them.
    """

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
        distributions = {axis.key: axis.make_distribution(optuna.distributions) for axis in self.axes}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(seed=self.seed + len(known), constant_liar=True)
        study = optuna.create_study(sampler=sampler)
        states = optuna.trial.TrialState
        for values in known:
            params = {axis.key: axis.find_value(value) for axis, value in zip(self.axes, values, strict=True)}
            if None in params.values():
                continue  # of an axis that had other values
            loss = self._read_smallest_metric_if_finished(self._make_point(values))
            state = states.RUNNING if loss is None else states.COMPLETE
            study.add_trial(
                optuna.trial.create_trial(state=state, params=params, distributions=distributions, value=loss)
            )
        suggested = study.ask(distributions).params
        values = [suggested[axis.key] for axis in self.axes]
        return [format_number(value) if isinstance(value, float) else value for value in values]

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
