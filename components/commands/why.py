"""find out why two runs differ: the first step, phase and tensor, and the edit of the recipe that causes it"""

import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.commands._replay import (
    Nodes,
    PhaseDigests,
    Replayer,
    TraceDifference,
    apply_single_edits,
    count_ranks,
    find_differing_metrics,
    find_first_difference,
    initial_states_differ,
    list_common_checkpoints,
    read_comparable_metrics,
    read_recipe_nodes,
    read_recorded_hashes,
)
from drawloom.components.report.metrics import read_lines
from drawloom.components.report.run_record import OWN_SETTINGS, find_differing_settings
from drawloom.graph import RecipeError, UserError
from drawloom.graph.cli.command import Command, argument, command, option
from drawloom.graph.cli.result import Result, output, output_class
from drawloom.graph.project import Project
from drawloom.graph.recipe.lockfile import LOCK

MAX_EDITS = 40
"""Edits that are tried one by one."""
MAX_NAMES_SHOWN = 5
ENVIRONMENT = "environment.json"
OBSERVERS = ("listeners", "trackers", "metrics")
"""Subjects whose nodes are tried last, because they only observe."""


@output_class
class WhySetting:
    """A setting or an environment entry with different values in both runs."""

    key: str = output("`node.key`, or the name of a version or choice")
    one: str = output("value of the first run; empty without it")
    other: str = output("value of the second run; empty without it")


@output_class
class WhyResult(Result):
    """The first difference between two runs, and its causes."""

    step: int | None = output("first step that differs; null if no difference was found")
    phase: str = output("phase after which it differs, if known")
    tensors: Sequence[str] = output("names of the differing tensors, the first ones of the step first")
    metrics_step: int | None = output("first step whose recorded metrics differ; it may be later than `step`")
    metrics: Sequence[WhySetting] = output("recorded metrics that differ in that step")
    source: str = output("recorded hashes, replay, or metrics")
    causes: Sequence[WhySetting] = output("settings, any one of which makes the first run differ there")
    settings: Sequence[WhySetting] = output("all settings in which the recipes differ")
    environment: Sequence[WhySetting] = output("recorded versions, devices and kernels that differ")
    notes: Sequence[str] = output("conclusions in sentences")

    def render(self, format: str) -> str:
        """Return the difference, its causes, and what else differs."""
        lines = []
        if self.step is not None:
            where = f"after [{self.phase}]" if self.phase and " " not in self.phase else self.phase
            lines.append(f"the runs first differ in step {self.step}{f', {where}' if where else ''} ({self.source})")
            more = f", and {len(self.tensors) - MAX_NAMES_SHOWN} more" if len(self.tensors) > MAX_NAMES_SHOWN else ""
            lines += [f"  {', '.join(self.tensors[:MAX_NAMES_SHOWN])}{more}"] if self.tensors else []
        lines += _format_settings_section(f"recorded metrics of step {self.metrics_step}", self.metrics)
        lines += _format_settings_section("caused by", self.causes)
        others = [setting for setting in self.settings if setting not in self.causes]
        lines += _format_settings_section(
            "also different in the recipes" if self.causes else "different in the recipes", others
        )
        lines += _format_settings_section("different in the environment", self.environment)
        return "\n".join([*lines, *self.notes])


def _format_settings_section(title: str, settings: Sequence[WhySetting]) -> list[str]:
    """Return a title with a line per setting; nothing without settings."""
    rows = [f"  {setting.key}: {setting.one or 'absent'} -> {setting.other or 'absent'}" for setting in settings]
    return [title, *rows] if rows else []


@command("runs")
class WhyCommand(Command):
    """A comparison of two runs' records, and of repeated steps if these do not tell phase and tensor."""

    one: Path = argument("a run folder", metavar="A")
    other: Path = argument("the run folder to compare it with", metavar="B")
    recorded: bool = option("compare only what both runs have recorded, without repeating steps")

    def run(self, project: Project) -> WhyResult:
        pair = Pair(self.one, read_recipe_nodes(self.one), self.other, read_recipe_nodes(self.other))
        recorded = [read_recorded_hashes(run) for run in (pair.one, pair.other)]
        if all(recorded) and (difference := find_first_difference(recorded[0], recorded[1])):
            return pair.make_result(difference, "recorded hashes")
        if self.recorded or pair.first_differing_step is None:
            return pair.make_result(
                None, "metrics", notes=[] if pair.first_differing_step else [pair.describe_equal_steps()]
            )
        with tempfile.TemporaryDirectory(prefix="why-") as folder:
            return _replay_both_and_find_causes(
                pair, pair.first_differing_step, Replayer(project, Path(folder), self.imports)
            )


def _replay_both_and_find_causes(pair: "Pair", step: int, replayer: Replayer) -> WhyResult:
    """Repeat both runs from the nearest checkpoint with equal states, and then the first run with single edits."""
    candidates = [*list_common_checkpoints(pair.one, pair.other, step), (None, None)]
    for start, other_start in candidates:
        one = _replay_and_read_hashes(pair.one, pair.nodes, start, step, replayer)
        other = _replay_and_read_hashes(pair.other, pair.other_nodes, other_start, step, replayer)
        if start is None or not initial_states_differ(one, other):
            break
    difference = find_first_difference(one, other)
    if difference is None:
        note = f"repeated on this machine, both runs are equal up to step {step}: the environment made the difference"
        return pair.make_result(None, "metrics", notes=[note])
    again = find_first_difference(one, _replay_and_read_hashes(pair.one, pair.nodes, start, difference.step, replayer))
    if again is not None:
        where = f"a second replay differs in step {again.step}, {again.names[0]}"
        note = f"the first run is not deterministic on this machine: {where}"
        return pair.make_result(difference, "replay", notes=[note])
    causes = list(_find_causes_by_edits(pair, one, difference, start, replayer))
    several = "no edit alone makes this difference: several together do"
    return pair.make_result(
        difference, "replay", causes, notes=[] if causes or not pair.differing_settings else [several]
    )


def _replay_and_read_hashes(
    run: Path, nodes: Nodes, start: Path | None, last_step: int, replayer: Replayer
) -> list[PhaseDigests]:
    """Repeat a run's recipe, or an edited one, on its ranks, and return the hashes."""
    ranks = count_ranks(run, nodes, replayer.project)
    return replayer.replay_and_read_hashes(nodes, start, last_step, ranks)


def _find_causes_by_edits(
    pair: "Pair", one: Sequence[PhaseDigests], difference: TraceDifference, start: Path | None, replayer: Replayer
) -> Iterator[str]:
    """Yield the keys, or nodes, whose value from the second run makes the first run differ at the same phase."""
    keys = sorted((setting.key for setting in pair.differing_settings), key=lambda key: key.startswith(OBSERVERS))
    for key, edited in islice(apply_single_edits(pair.nodes, keys, pair.other_nodes), MAX_EDITS):
        try:
            trace = _replay_and_read_hashes(pair.one, edited, start, difference.step, replayer)
        except (RecipeError, UserError):  # this edit needs others
            continue
        replayed = find_first_difference(one, trace)
        if replayed is not None and (replayed.step, replayed.phase) == (difference.step, difference.phase):
            yield key


@attrs.frozen
class Pair:
    """Two runs, and their differing records."""

    one: Path
    nodes: Nodes
    other: Path
    other_nodes: Nodes

    @cached_property
    def differing_settings(self) -> list[WhySetting]:
        """Settings with different values in both recipes, without the runs' names and folders."""
        texts = [b"".join(read_lines(run / LOCK)).decode("utf-8", "replace") for run in (self.one, self.other)]
        return [
            WhySetting(key, values[0], values[1])
            for key, values in find_differing_settings(texts)
            if key not in OWN_SETTINGS
        ]

    @cached_property
    def metrics_by_step_per_run(self) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
        """Recorded metrics of both runs by step."""
        return read_comparable_metrics(self.one), read_comparable_metrics(self.other)

    @cached_property
    def first_differing_step(self) -> int | None:
        """The first common step with a different metric."""
        one, other = self.metrics_by_step_per_run
        return next(
            (step for step in sorted(one.keys() & other.keys()) if find_differing_metrics(one[step], other[step])), None
        )

    def describe_equal_steps(self) -> str:
        """Return a sentence about the steps without a difference."""
        common = self.metrics_by_step_per_run[0].keys() & self.metrics_by_step_per_run[1].keys()
        if not common:
            return "the runs have no common step"
        return f"all recorded metrics are equal in the {len(common)} common steps, up to step {max(common)}"

    def make_result(
        self, difference: TraceDifference | None, source: str, causes: Sequence[str] = (), notes: Sequence[str] = ()
    ) -> WhyResult:
        """Return the result for a difference, or for the metrics alone."""
        one, other = self.metrics_by_step_per_run
        names = (
            find_differing_metrics(one[self.first_differing_step], other[self.first_differing_step])
            if self.first_differing_step is not None
            else []
        )
        # a swapped component is a cause as a whole node
        shown = [s for s in self.differing_settings if s.key in causes or s.key.rpartition(".")[0] in causes]
        environments = _read_versions_and_choices(self.one), _read_versions_and_choices(self.other)
        return WhyResult(
            step=difference.step if difference else self.first_differing_step,
            phase=difference.phase if difference else "",
            tensors=list(difference.names) if difference else [],
            metrics_step=self.first_differing_step,
            metrics=[
                WhySetting(
                    name,
                    str(one[self.first_differing_step].get(name, "")),
                    str(other[self.first_differing_step].get(name, "")),
                )
                for name in names
                if self.first_differing_step is not None
            ],
            source=source,
            causes=shown,
            settings=self.differing_settings,
            environment=[
                WhySetting(key, environments[0].get(key, ""), environments[1].get(key, ""))
                for key in {**environments[0], **environments[1]}
                if environments[0].get(key) != environments[1].get(key)
            ],
            notes=list(notes),
        )


def _read_versions_and_choices(run: Path) -> dict[str, str]:
    """Return a run's recorded library versions and automatic choices; empty without a record."""
    try:
        entries = json.loads(b"".join(read_lines(run / "log" / ENVIRONMENT)) or b"{}")
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in entries.items()} if isinstance(entries, dict) else {}
