"""compare runs: how their recipes differ, and means, spreads and curves over seeds"""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from drawloom.components.commands._plots import draw_text_plot
from drawloom.components.commands.runs.runs import shorten_value
from drawloom.components.report.run_record import (
    Drawings,
    RunRecord,
    find_run_folders,
    make_unique_run_names,
    read_run_record,
)
from drawloom.components.report.seed_groups import SeedGroup, SeedSpread, find_last_common_step, group_runs_by_settings
from drawloom.graph.cli.command import (
    Command,
    Project,
    Result,
    UserError,
    argument,
    command,
    format_table,
    option,
    output,
    output_class,
)

METRICS = ("loss", "validation_loss")
MAX_WIDTH = 120
MIN_STEPS_TO_CUT = 120
"""Minimum steps of a curve whose picture leaves out the first tenth."""
MAX_VALUE_LENGTH = 40
"""Characters of a setting's value in the text; JSON has all."""


@output_class
class ComparedMetric:
    """A metric of a group."""

    end: SeedSpread | None = output("at the last step that all runs have")
    best: SeedSpread | None = output("smallest values of the runs")
    steps: Sequence[int] = output("steps of the curve, thinned")
    values: Sequence[float] = output("mean over the seeds at these steps")


@output_class
class ComparedGroup:
    """Runs whose recipes differ in seeds alone."""

    name: str = output("settings that set the group apart, or the name of its first run")
    runs: Sequence[str] = output("names of the runs, one per seed")
    settings: Mapping[str, str] = output("settings in which the groups differ, as TOML; empty without the setting")
    metrics: Mapping[str, ComparedMetric] = output("metrics by name")


@output_class
class CompareResult(Result):
    """Runs compared, with the seeds of a recipe as a group."""

    groups: Sequence[ComparedGroup] = output("groups, in the order of their first runs")
    last_steps: Mapping[str, int] = output("last step that all runs have, by metric")

    def render(self, format: str) -> str:
        """Return tables of settings and metrics, and a picture per metric."""
        parts = [self._format_settings(), *(self._format_metric(name) for name in self.last_steps)]
        return "\n\n".join(filter(None, parts))

    def _format_settings(self) -> str:
        """Return the groups' differing settings, by node, or why there are none."""
        if len(self.groups) == 1:
            return "the recipes differ in seeds and names alone"
        if not (keys := list(self.groups[0].settings)):
            return "some recipes can't be read, so that their differences are not known"
        nodes: dict[str, list[str]] = {}
        for key in keys:
            node, _, name = key.rpartition(".")
            values = " | ".join(
                shorten_value(group.settings[key], MAX_VALUE_LENGTH) or "absent" for group in self.groups
            )
            nodes.setdefault(node, []).append(f"  {name} = {values}")
        return "\n".join(line for node, lines in nodes.items() for line in (f"[{node}]", *lines))

    def _format_metric(self, name: str) -> str:
        """Return a metric's table over groups, and its picture."""
        rows: list[tuple[str, ...]] = [("", "seeds", f"{name} after step {self.last_steps[name]:,}", "smallest")]
        for group in self.groups:
            metric = group.metrics.get(name)
            cells = [str(spread or "") for spread in ((metric.end, metric.best) if metric else ("", ""))]
            rows.append((group.name, str(len(group.runs)), *cells))
        curves = {
            group.name: [*zip(metric.steps, metric.values, strict=True)]
            for group in self.groups
            if (metric := group.metrics.get(name))
        }
        last = max(curve[-1][0] for curve in curves.values())
        # A loss falls steeply at first, which would hide differences at the end.
        start = last / 10 if last >= MIN_STEPS_TO_CUT else 0
        points = {group: [point for point in curve if point[0] >= start] for group, curve in curves.items()}
        width = min(shutil.get_terminal_size((MAX_WIDTH, 0)).columns, MAX_WIDTH)
        return f"{format_table(rows, left=range(4))}\n\n{draw_text_plot(name, points, width)}"


@command
class CompareCommand(Command):
    """A comparison between runs, grouped by their recipes."""

    folders: Sequence[Path] = argument("run folders, or folders of runs, such as a sweep's", metavar="FOLDER")
    metric: Sequence[str] = option(
        f"metric to compare; may be repeated (default: {' and '.join(METRICS)})", default=(), metavar="NAME"
    )

    def run(self, project: Project) -> CompareResult:
        runs = _read_runs(self.folders)
        groups = group_runs_by_settings(runs)
        asked = self.metric or METRICS
        ends = {name: step for name in asked if (step := find_last_common_step(groups, name)) is not None}
        if unknown := [name for name in self.metric if name not in ends]:
            known = dict.fromkeys(name for run in runs for name in run.metrics.columns)
            why = "it is not in the same step of all runs" if unknown[0] in known else "no run has this metric"
            raise UserError(f"--metric {unknown[0]}: {why}; they have {', '.join(known)}", 2)
        return CompareResult([_compare_at_last_steps(group, ends) for group in groups], ends)


def _read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read all runs in and below the folders. Raises UserError for fewer than two."""
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; give run folders, such as runs/first_run", 2)
    paths = list(dict.fromkeys(path for folder in folders for path in find_run_folders(folder)))
    if len(paths) < 2:
        raise UserError(f"{' '.join(map(str, folders))}: {len(paths)} runs; give two runs or more to compare", 2)
    return [
        read_run_record(path, name, Drawings()) for path, name in zip(paths, make_unique_run_names(paths), strict=True)
    ]


def _compare_at_last_steps(group: SeedGroup, last_common_steps: Mapping[str, int]) -> ComparedGroup:
    """Return a group with its metrics at the metrics' `last_common_steps`, and its curves."""
    curves = group.curves_over_seeds()
    metrics = {
        name: ComparedMetric(
            group.spread_at_step(name, step), group.spread_of_best_values(name), curves[name].x, curves[name].y
        )
        for name, step in last_common_steps.items()
        if name in curves
    }
    return ComparedGroup(group.name, [run.name for run in group.runs], group.settings, metrics)
