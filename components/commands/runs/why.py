"""find out why two runs differ: the first step, phase and tensor, and the edit of the recipe that causes it"""

import copy
import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import attrs

from drawloom.components.checkpoint.phase_hashes import INITIAL
from drawloom.components.commands.runs._replay import (
    MetricsDifference,
    Nodes,
    PhaseDifference,
    RecordedRun,
    RecordedSteps,
    Replayer,
)
from drawloom.components.report.metrics import read_lines
from drawloom.components.report.run_record import list_differing_settings, parse_recipe_settings
from drawloom.graph.cli.command import (
    Command,
    Project,
    RecipeError,
    Result,
    UserError,
    argument,
    command,
    option,
    output,
    output_class,
)
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


@command
class WhyCommand(Command):
    """A comparison between two runs' records, and between repeated steps if no hashes name phase and tensor."""

    one: Path = argument("a run folder", metavar="A")
    other: Path = argument("the run folder to compare it with", metavar="B")
    recorded: bool = option("compare only what both runs have recorded, without repeating steps")

    def run(self, project: Project) -> WhyResult:
        pair = Pair(RecordedRun.read(self.one), RecordedRun.read(self.other))
        one, other = pair.one.record, pair.other.record
        if difference := one.find_different_phase(other):
            return pair.make_result(difference, "recorded hashes")
        if self.recorded or pair.different_metrics is None:
            return pair.make_result(
                None, "metrics", notes=[] if pair.different_metrics else [pair.describe_equal_steps()]
            )
        with tempfile.TemporaryDirectory(prefix="why-") as folder:
            replayer = Replayer(project, Path(folder), self.imports)
            return _replay_both_and_find_causes(pair, pair.different_metrics.step, replayer)


def _replay_both_and_find_causes(pair: "Pair", step: int, replayer: Replayer) -> WhyResult:
    """Repeat both runs from the nearest checkpoint with equal states, and then the first run with single edits."""
    starts, other_starts = (run.find_checkpoints_before(step) for run in (pair.one, pair.other))
    for number in [*sorted(starts.keys() & other_starts.keys(), reverse=True), 0]:
        start = starts.get(number)
        one = replayer.replay(pair.one, start, step)
        difference = one.find_different_phase(replayer.replay(pair.other, other_starts.get(number), step))
        if difference is None or difference.phase != INITIAL:
            break  # the states were equal at the start
    if difference is None:
        note = f"repeated on this machine, both runs are equal up to step {step}: the environment made the difference"
        return pair.make_result(None, "metrics", notes=[note])
    again = one.find_different_phase(replayer.replay(pair.one, start, difference.step))
    if again is not None:
        where = f"a second replay differs in step {again.step}, {again.names[0]}"
        note = f"the first run is not deterministic on this machine: {where}"
        return pair.make_result(difference, "replay", notes=[note])
    causes = list(_find_causes_by_edits(pair, one, difference, start, replayer))
    several = "no edit alone makes this difference: several together do"
    return pair.make_result(
        difference, "replay", causes, notes=[] if causes or not pair.differing_settings else [several]
    )


def _find_causes_by_edits(
    pair: "Pair", one: RecordedSteps, difference: PhaseDifference, start: Path | None, replayer: Replayer
) -> Iterator[str]:
    """Yield the keys, or nodes, whose value from the second run makes the first run differ at the same phase."""
    keys = sorted((setting.key for setting in pair.differing_settings), key=lambda key: key.startswith(OBSERVERS))
    for key, edited in islice(apply_single_edits(pair.one.nodes, keys, pair.other.nodes), MAX_EDITS):
        try:
            replayed = replayer.replay(attrs.evolve(pair.one, nodes=edited), start, difference.step)
        except (RecipeError, UserError):  # this edit needs others
            continue
        edit = one.find_different_phase(replayed)
        if edit is not None and (edit.step, edit.phase) == (difference.step, difference.phase):
            yield key


@attrs.frozen
class Pair:
    """Two runs, and their differing records."""

    one: RecordedRun
    other: RecordedRun

    @cached_property
    def differing_settings(self) -> list[WhySetting]:
        """Settings with different values in both recipes, without the runs' names and folders."""
        paths = [run.folder / LOCK for run in (self.one, self.other)]
        one, other = (parse_recipe_settings(b"".join(read_lines(path)).decode("utf-8", "replace")) for path in paths)
        return [WhySetting(key, one.get(key, ""), other.get(key, "")) for key in list_differing_settings([one, other])]

    @cached_property
    def different_metrics(self) -> MetricsDifference | None:
        """The first common step with a different metric."""
        return self.one.record.find_different_metrics(self.other.record)

    def describe_equal_steps(self) -> str:
        """Return a sentence about the steps without a difference."""
        common = self.one.record.metrics.keys() & self.other.record.metrics.keys()
        if not common:
            return "the runs have no common step"
        return f"all recorded metrics are equal in the {len(common)} common steps, up to step {max(common)}"

    def make_result(
        self, difference: PhaseDifference | None, source: str, causes: Sequence[str] = (), notes: Sequence[str] = ()
    ) -> WhyResult:
        """Return the result for a difference, or for the metrics alone."""
        metrics = self.different_metrics
        metrics_step = metrics.step if metrics else None
        # a swapped component is a cause as a whole node
        shown = [s for s in self.differing_settings if s.key in causes or s.key.rpartition(".")[0] in causes]
        versions, others = (_read_versions_and_choices(run.folder) for run in (self.one, self.other))
        return WhyResult(
            step=difference.step if difference else metrics_step,
            phase=difference.phase if difference else "",
            tensors=difference.names if difference else [],
            metrics_step=metrics_step,
            metrics=[WhySetting(name, one, other) for name, (one, other) in metrics.values.items()] if metrics else [],
            source=source,
            causes=shown,
            settings=self.differing_settings,
            environment=[
                WhySetting(key, versions.get(key, ""), others.get(key, ""))
                for key in {**versions, **others}
                if versions.get(key) != others.get(key)
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


def apply_single_edits(nodes: Nodes, keys: Sequence[str], others: Nodes) -> Iterator[tuple[str, Nodes]]:
    """
    Yield copies of `nodes` with one edit, and the edit's key: a value from `others`, or a node's whole table.

    Nodes that only the other recipe has are there, too, since a value may refer to them.
    """
    nodes = {**{name: table for name, table in others.items() if name not in nodes}, **nodes}
    for node in dict.fromkeys(key.rpartition(".")[0] for key in keys):
        mine, theirs = find_node_table(nodes, node), find_node_table(others, node)
        own = [key for key in keys if key.rpartition(".")[0] == node]
        if mine is None or theirs is None or mine.get("use") != theirs.get("use"):
            yield node, replace_node_table(nodes, node, theirs)
            continue
        for key in own:
            name = key.rpartition(".")[2]
            table = {**mine, name: theirs[name]} if name in theirs else {k: v for k, v in mine.items() if k != name}
            yield key, replace_node_table(nodes, node, table)


def find_node_table(nodes: Nodes, node: str) -> Nodes | None:
    """Return the table of a node, whose name may contain groups, or None."""
    part: Any = nodes
    for name in node.split("."):
        part = part.get(name) if isinstance(part, dict) else None
    return part if isinstance(part, dict) else None


def replace_node_table(nodes: Nodes, node: str, table: Nodes | None) -> Nodes:
    """Return a recipe's copy with this table for a node, or without the node if the table is None."""
    data = copy.deepcopy(nodes)
    *groups, last = node.split(".")
    part = data
    for name in groups:
        part = part.setdefault(name, {})
    if table is None:
        part.pop(last, None)
    else:
        part[last] = copy.deepcopy(table)
    return data
