"""run a recipe, or resume its run"""

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from drawloom.graph.cli.command import (
    OK,
    STOPPED,
    Project,
    Recipe,
    RecipeCommand,
    Result,
    command,
    option,
    output,
    output_class,
    print_escaped_text,
)
from drawloom.graph.garbage import free_closed_graphs
from drawloom.graph.lifecycle import LifecycleStage, NodeTiming
from drawloom.graph.problems import ReopenError

STAGES: tuple[LifecycleStage, ...] = ("build", "open", "close")

MIN_SECONDS_SHOWN = 0.001
"""Seconds; faster nodes share one line in the table of timings."""


@output_class
class RunResult(Result):
    """An ended run, or its preview with --dry-run."""

    recipe: str = output("recipe as given")
    signal: int = output("signal that stopped the run, or 0", default=0)
    preview: str = output("description of the run, with --dry-run only", default="")
    outcome: Mapping[str, Mapping[str, Any]] = output(
        "facts by node, such as run.folder and trainer.step", default=attrs.Factory(dict)
    )

    @property
    def exit_code(self) -> int:
        """128 plus the signal, or 0."""
        return STOPPED + self.signal if self.signal else OK

    def render(self, format: str) -> str:
        """Return the preview. A run prints its progress itself."""
        return self.preview


@command
class RunCommand(RecipeCommand):
    """A recipe's run, opened again after a failure its nodes can survive."""

    timings: bool = option("print the seconds for building, opening and closing each node")
    accept_changes: bool = option("resume the run even if its recipe has changed")
    dry_run: bool = option("describe the run without starting it")

    def run(self, project: Project) -> RunResult:
        recipe = self.load_checked_recipe_and_warn(project, self.recipe)
        if self.dry_run:
            return RunResult(self.recipe, preview=recipe.preview())
        handed_over: Mapping[str, Any] = {}
        try:
            while True:
                gc.freeze()  # imports make a million objects, through which every full collection would walk
                try:
                    return self._open_and_run_once(recipe, project.root, handed_over)
                except ReopenError as request:
                    handed_over = request.handed_over
                free_closed_graphs()
        finally:
            gc.unfreeze()

    def _open_and_run_once(self, recipe: Recipe, root: str, handed_over: Mapping[str, Any]) -> RunResult:
        """Open the run with a failed attempt's values, run it to its end or a signal, and print its timings."""
        run = recipe.open(accept_changes=self.accept_changes)
        run.handed_over = handed_over
        try:
            with run:
                signal = run[root].run()  # the signal that stopped the run, or 0
                outcome = run.outcome()
        finally:
            if self.timings:
                print_escaped_text(format_timings(run.timings), "stderr")
        return RunResult(self.recipe, signal, outcome=outcome)


def format_timings(timings: Sequence[NodeTiming]) -> str:
    """
    Format a table of milliseconds by node and stage, slowest nodes first. The last rows sum up fast nodes and all
    nodes.
    """
    totals: dict[str, dict[LifecycleStage, float]] = {}
    for timing in timings:
        stages = totals.setdefault(timing.node, dict.fromkeys(STAGES, 0.0))
        stages[timing.stage] += timing.seconds
    slowest = sorted(totals.items(), key=lambda item: -sum(item[1].values()))
    rows = [(f"[{name}]", times) for name, times in slowest if sum(times.values()) >= MIN_SECONDS_SHOWN]
    others = [times for _, times in slowest if sum(times.values()) < MIN_SECONDS_SHOWN]
    if others:
        rows.append((f"{len(others)} others", _sum_seconds_by_lifecycle_stage(others)))
    rows.append(("all", _sum_seconds_by_lifecycle_stage(list(totals.values()))))
    width = max(len(name) for name, _ in rows)
    head = f"{'ms':{width}}{''.join(f'{stage:>10}' for stage in STAGES)}"
    return "\n".join(
        [head, *(f"{name:{width}}{''.join(f'{1000 * part:10.1f}' for part in times.values())}" for name, times in rows)]
    )


def _sum_seconds_by_lifecycle_stage(timings: Sequence[Mapping[LifecycleStage, float]]) -> dict[LifecycleStage, float]:
    return {stage: sum(times[stage] for times in timings) for stage in STAGES}
