"""run a recipe, or resume its run"""

import gc
from collections.abc import Mapping
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
from drawloom.graph.problems import ReopenError
from drawloom.graph.runtime.container import format_timings


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
