"""
run a recipe for every combination of some values, one run after another

The runs are in a folder of the sweep, named by their values. Every run is a process of its own, so that a failure ends
only one run. Started again, the command skips finished runs and resumes the others.
"""

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import attrs

from drawloom.components.commands._recipes import add_overlays
from drawloom.components.commands._sweep_points import Point, points_of
from drawloom.components.commands.runs import as_text
from drawloom.components.report.events import read_log
from drawloom.components.report.run_table import RunRow, read_rows, run_state, sort_rows
from drawloom.graph import Problem, RecipeError, UserError
from drawloom.graph.cli.exit_codes import FAILED, OK, STOPPED
from drawloom.graph.cli.result import Result, output, output_class
from drawloom.graph.cli.terminal import print_text
from drawloom.graph.inspect.changes import resolve
from drawloom.graph.project import Project, Recipe
from drawloom.graph.recipe.lockfile import LOCK

FORWARDED = (signal.SIGINT, signal.SIGTERM)


@attrs.frozen(eq=False)
class SweepRun:
    """A run of the sweep: its point, its folder, its recipe, and the words that make the recipe."""

    point: Point
    folder: Path
    words: list[str]
    recipe: Recipe

    @property
    def state(self) -> str:
        """
        The state of the run in the folder, "new" without one. A finished run of another recipe has "changed", since its
        command may have more to do.
        """
        lock = self.folder / LOCK
        if not lock.is_file():
            return "new"
        state = run_state(self.folder, read_log(self.folder))
        if state != "finished":
            return state
        return "changed" if resolve(self.recipe.graph).changes(lock.read_text("utf-8")) else "finished"


@output_class
class SweepPoint:
    """A run of a sweep."""

    run: str = output("name, from the values of the axes")
    words: Sequence[str] = output("words that are merged over the recipe")
    state: str = output("state before the sweep: new, changed, or as in `drawloom runs`")
    exit_code: int | None = output("exit code of the run; null if it was not started")


@output_class
class SweepResult(Result):
    """Runs of a sweep."""

    folder: Path = output("folder of the runs")
    points: Sequence[SweepPoint] = output("runs, in the order of the sweep")
    runs: Sequence[RunRow] = output("runs with their losses, best first")
    signal: int = output("signal that stopped the sweep, or 0")

    @property
    def exit_code(self) -> int:
        """1 if a run has failed, or 128 plus the signal."""
        if self.signal:
            return STOPPED + self.signal
        return FAILED if any(point.exit_code for point in self.points) else OK

    def render(self, format: str) -> str:
        """Return the table of the runs; with --dry-run, their names and states."""
        if any(point.exit_code is not None for point in self.points) or self.runs:
            return as_text(self.runs)
        return "\n".join(f"{point.run}  {point.state}" for point in self.points)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line arguments."""
    parser.add_argument("recipe", metavar="RECIPE", help="a path, or the name of a shipped recipe")
    add_overlays(parser)
    parser.add_argument("--to", type=Path, metavar="FOLDER", help="folder for the runs (default: runs/NAME-sweep)")
    parser.add_argument("--dry-run", action="store_true", help="check and list the runs without starting them")
    parser.epilog = "Write several values as node.key=a,b,c, and whole numbers as node.key=0..2."


def main(options: argparse.Namespace, project: Project) -> SweepResult:
    """Check all runs, then run them."""
    runs = _check(options, project)
    folder = runs[0].folder.parent
    print_text(f"{len(runs)} runs in {folder}")
    points = [SweepPoint(run.point.name, run.words, run.state, None) for run in runs]
    if options.dry_run:
        return SweepResult(folder, points, [], 0)
    stopped = 0
    with _forwarding() as sender:
        for number, run in enumerate(runs, 1):
            if (state := points[number - 1].state) == "finished":
                print_text(f"run {number} of {len(runs)}: {run.point.name} is finished")
                continue
            print_text(f"run {number} of {len(runs)}: {run.point.name}{'' if state == 'new' else f' ({state} before)'}")
            code = sender.run(_command(options, project, run))
            points[number - 1] = SweepPoint(run.point.name, run.words, state, code)
            if code > STOPPED:
                print_text("the sweep is stopped; the same command resumes it", "stderr")
                stopped = code - STOPPED
                break
    if not stopped and (failed := [point.run for point in points if point.exit_code]):
        print_text(f"failed: {' '.join(failed)}; the same command tries them again", "stderr")
    return SweepResult(folder, points, sort_rows(read_rows(folder), "best"), stopped)


def _check(options: argparse.Namespace, project: Project) -> list[SweepRun]:
    """Return the runs. Raises RecipeError with the problems of all of them, each problem once."""
    points = points_of(options.words)
    folder = options.to or _default_folder(options, project, points[0])
    problems: dict[str, Problem] = {}
    runs = []
    for point in points:
        words = [*point.words, f"run.name={point.name}", f"run.folder={folder / point.name}"]
        recipe = Recipe.load(options.recipe, *words, overlays=options.overlay, project=project)
        try:
            problems |= {str(problem): problem for problem in recipe.check()}
        except RecipeError as error:
            problems |= {str(problem): problem for problem in error.problems}
        runs.append(SweepRun(point, folder / point.name, words, recipe))
    if errors := [problem for problem in problems.values() if not problem.warning]:
        raise RecipeError(errors)
    options.console.warn(problems.values())
    return runs


def _default_folder(options: argparse.Namespace, project: Project, point: Point) -> Path:
    recipe = Recipe.load(options.recipe, *point.words, overlays=options.overlay, project=project)
    node = recipe.graph.nodes.get("run")
    if node is None or "name" not in node.settings:
        recipe.check(elsewhere=True)
        raise UserError("the recipe has no run.name for the folder of the sweep; write one with --to FOLDER", 2)
    return Path("runs") / f"{node.settings['name']}-sweep"


def _command(options: argparse.Namespace, project: Project, run: SweepRun) -> list[str]:
    package = project.registry.package.partition(".")[0]
    overlays = [word for path in options.overlay for word in ("--overlay", path)]
    imports = [f"--import={path}" for path in options.imports]
    return [sys.executable, "-m", package, "run", options.recipe, *overlays, *imports, *run.words]


class _Sender:
    """Starter of processes, which forwards signals to the newest one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._received = 0

    def run(self, command: Sequence[str]) -> int:
        """Run a process, and return its exit code. After a signal it starts nothing, and returns the signal's code."""
        if self._received:
            return STOPPED + self._received
        self._process = subprocess.Popen(command)
        code = self._process.wait()
        return FAILED if code < 0 else code

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Forward a signal; the process saves a checkpoint, and ends."""
        self._received = number
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)


@contextmanager
def _forwarding() -> Iterator[_Sender]:
    """Forward signals to the sender's process, instead of ending this one."""
    sender = _Sender()
    before = {number: signal.signal(number, sender.handle) for number in FORWARDED}
    try:
        yield sender
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
