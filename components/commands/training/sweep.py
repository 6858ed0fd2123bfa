"""
run a recipe for every combination of some values, for random ones, or for values that a search chooses

The runs are in a folder of the sweep, named by their values. Every run is a process of its own, so that a failure ends
only one run. Started again, the command skips finished runs and resumes the others.
"""

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import ClassVar

import attrs

from drawloom import at_least
from drawloom.components.commands._options import check_writable_file, write_file
from drawloom.components.commands.runs.runs import format_run_table
from drawloom.components.commands.training._sweep_points import (
    Point,
    SweepSearch,
    list_points_covering_axes,
    make_sweep_points,
    read_axes_and_common_words,
)
from drawloom.components.distributed.cpu_threads import THREADS, count_threads_per_process
from drawloom.components.distributed.device_model import DeviceModel, find_device_model
from drawloom.components.planning.plan import plan
from drawloom.components.planning.run_length import count_run_length
from drawloom.components.report.events import read_log
from drawloom.components.report.run_record import RunRow, determine_run_state, read_run_rows, sort_run_rows
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.graph.cli.command import (
    FAILED,
    OK,
    STOPPED,
    Count,
    Problem,
    Project,
    Recipe,
    RecipeCommand,
    RecipeError,
    Result,
    UserError,
    command,
    internal,
    option,
    output,
    output_class,
    print_escaped_text,
)
from drawloom.graph.inspect.resolved import make_resolved_recipe
from drawloom.graph.recipe.lockfile import LOCK

FORWARDED = (signal.SIGINT, signal.SIGTERM)
POLL_SECONDS = 0.05


@attrs.define(eq=False)
class ProcessPool:
    """Runner of commands, at most `size` at a time. Several at a time share the cores and print nothing on stdout."""

    size: int
    received: int = 0
    _running: dict[int, "subprocess.Popen[bytes]"] = attrs.field(factory=dict)

    def run_and_yield_exit_codes(
        self, commands: Iterable[Sequence[str]], on_start: Callable[[int], None]
    ) -> Iterator[tuple[int, int]]:
        """
        Run all commands, and yield index and exit code when one ends. `on_start(index)` is called before a start.

        A command is taken from the iterable when it can start. After a signal nothing more is started. A process that a
        signal kills has the code FAILED; one that handles it has its own.
        """
        waiting, is_exhausted = enumerate(commands), False
        while self._running or not (is_exhausted or self.received):
            while len(self._running) < self.size and not (is_exhausted or self.received):
                if (following := next(waiting, None)) is None:
                    is_exhausted = True
                else:
                    index, command = following
                    on_start(index)
                    self._running[index] = process = self._start_process(command)
                    if self.received:  # while the process was started
                        process.send_signal(self.received)
            for index, code in [(index, process.poll()) for index, process in self._running.items()]:
                if code is not None:
                    del self._running[index]
                    yield index, FAILED if code < 0 else code
            time.sleep(POLL_SECONDS if self._running else 0)

    def _start_process(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start a command; with several at a time, limit its threads and discard its stdout."""
        if self.size == 1:
            return subprocess.Popen(command)
        environment = {THREADS: str(count_threads_per_process(self.size)), **os.environ}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def forward_signal(self, number: int, _frame: FrameType | None) -> None:
        """Forward a signal; the processes save a checkpoint, and end."""
        self.received = number
        for process in self._running.values():
            if process.poll() is None:
                process.send_signal(number)


@contextmanager
def open_pool_with_signal_forwarding(size: int) -> Iterator[ProcessPool]:
    """Yield a pool. Until the context ends, SIGINT and SIGTERM go to its processes instead of ending this one."""
    pool = ProcessPool(size)
    before = {number: signal.signal(number, pool.forward_signal) for number in FORWARDED}
    try:
        yield pool
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=0-{last}{limit}
#SBATCH --output={output}
#SBATCH --signal=B:TERM@120
{options}\
# Run {count} points of a sweep; submit it again to resume unfinished runs.
commands=(
{commands}
)
cd {here}
trap 'kill -TERM "$child"' TERM  # the run saves its step, and ends
eval "exec ${{commands[$SLURM_ARRAY_TASK_ID]}}" &  # exec: the child is the run itself
child=$!
wait "$child"
code=$?
while kill -0 "$child" 2>/dev/null; do  # a signal has interrupted the wait
  wait "$child"
  code=$?
done
exit $code
"""


def format_array_script(
    name: str,
    commands: Sequence[Sequence[str]],
    folder: Path,
    *,
    max_parallel_tasks: int | None,
    options: Sequence[str],
) -> str:
    """Return a script for `sbatch` with a command per array task, `max_parallel_tasks` of them together."""
    return SCRIPT.format(
        name=name.replace(" ", "_"),
        last=len(commands) - 1,
        limit=f"%{max_parallel_tasks}" if max_parallel_tasks else "",
        output=shlex.quote(str(folder.absolute() / "slurm-%A_%a.txt")),  # sbatch reads quotes as a shell does
        options="".join(f"#SBATCH {option}\n" for option in options),
        count=len(commands),
        commands="\n".join(f"  {shlex.quote(shlex.join(command))}" for command in commands),
        here=shlex.quote(str(Path.cwd())),
    )


@attrs.define(eq=False)
class SweepPoint:
    """A run of a sweep."""

    run: str = output("name, from the values of the axes")
    words: Sequence[str] = output("words that are merged over the recipe")
    recipe: Recipe = internal()
    state: str = output("state before the sweep: new, changed, or as in `drawloom runs`")
    exit_code: int | None = output("exit code of the run; null if it was not started", default=None)


def determine_state_before_sweep(folder: Path, recipe: Recipe) -> str:
    """
    Return the state of the run in a folder, "new" without one.

    A finished run of another recipe has "changed", since its command may have more to do.
    """
    lock = folder / LOCK
    if not lock.is_file():
        return "new"
    state = determine_run_state(folder, read_log(folder))
    has_changed = state == "finished" and make_resolved_recipe(recipe.graph).changes(lock.read_text("utf-8"))
    return "changed" if has_changed else state


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
            return format_run_table(self.runs)
        return "\n".join(f"{point.run}  {point.state}" for point in self.points)


@command
class SweepCommand(RecipeCommand):
    """A recipe's runs with different values, checked and planned before the first one starts."""

    epilog: ClassVar[str] = (
        "Write several values as node.key=a,b,c, whole numbers as node.key=0..2, and with --random or --search "
        "intervals as node.key=1e-4..1e-2:log or node.key=0.1..0.3:uniform."
    )

    axes: Path | None = option(
        "TOML file with a table [axes] of lists, ranges and intervals, or with [[points]]", metavar="FILE"
    )
    random: Count | None = option("N random points instead of the grid", exclusive="points")
    search: Count | None = option("N points, chosen by Optuna from the results so far (TPE)", exclusive="points")
    metric: str = option(
        "the metric to minimize, by its smallest value in a run",
        default="validation_loss",
        metavar="NAME",
        needs="search",
    )
    random_seed: int = option("seed of --random or --search", default=0, metavar="S", check=at_least(0))
    jobs: Count = option("runs at a time", default=1)
    to: Path | None = option("folder of the runs (default: runs/NAME-sweep)", metavar="FOLDER")
    device: str = option(
        "as in `drawloom plan`: plan all runs for this device first, and refuse runs that do not fit",
        default="",
        metavar="DEVICE|FILE",
    )
    submit: Path | None = option(
        "write a SLURM array script of the unfinished runs instead of running them",
        metavar="FILE",
        check=check_writable_file,
    )
    sbatch: Sequence[str] = option(
        "an option of sbatch, such as --sbatch=--gres=gpu:1; may be repeated",
        default=(),
        metavar="OPTION",
        needs="submit",
    )
    dry_run: bool = option("check and list the runs without starting them")

    def run(self, project: Project) -> SweepResult:
        if self.search is not None and self.submit is not None:
            raise UserError(
                "--submit writes a script of known points, and --search chooses them later; use --random N", 2
            )
        queue = self._load_queue(project)
        folder = queue.folder
        if self.device:
            _check_fit_and_print_hours(queue.runs, find_device_model(self.device))
        print_escaped_text(f"{queue.count} runs in {folder}")
        if self.submit is not None:
            commands = [self.make_train_command(project, run.words) for run in queue.unfinished]
            self._write_array_script(self.submit, folder, commands)
        if self.dry_run or self.submit is not None:
            return SweepResult(folder, queue.runs, [], 0)
        with open_pool_with_signal_forwarding(self.jobs) as pool:
            for index, code in pool.run_and_yield_exit_codes(
                queue.iterate_queued_and_searched_commands(), queue.report_start
            ):
                queue.keep_and_print_exit_code(index, code)
        if queue.error is not None:
            raise queue.error
        if pool.received:
            print_escaped_text("the sweep is stopped; the same command resumes it", "stderr")
        elif failed := [run.run for run in queue.runs if run.exit_code]:
            print_escaped_text(f"failed: {' '.join(failed)}; the same command tries them again", "stderr")
        return SweepResult(folder, queue.runs, sort_run_rows(read_run_rows(folder), "best"), pool.received)

    def _write_array_script(self, file: Path, folder: Path, commands: Sequence[Sequence[str]]) -> None:
        """Write the SLURM script for unfinished runs. Raises UserError if there are none."""
        if not commands:
            raise UserError("all runs of the sweep are finished; there is nothing to submit")
        limit = self.jobs if self.jobs > 1 else None
        script = format_array_script(folder.name, commands, folder, max_parallel_tasks=limit, options=self.sbatch)
        folder.mkdir(parents=True, exist_ok=True)  # SLURM does not create it for its output
        write_file(file, script.encode())
        print_escaped_text(f"submit {len(commands)} runs with: sbatch {file}")

    def _load_queue(self, project: Project) -> "SweepQueue":
        """Return the runs, with checked recipes; of a search, all chosen so far, after a check of the axes' ends."""
        if self.search is None:
            points = make_sweep_points(self.words, self.axes, self.random, self.random_seed)
        else:
            axes, common = read_axes_and_common_words(self.words, self.axes)
            points = list_points_covering_axes(axes, common)
        folder = self.to or self._default_folder(project, points[0])
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder} is not a folder; write another one with --to", 2)
        runs, search = self.load_and_check_runs(project, points, folder), None
        if self.search is not None:
            search = SweepSearch(axes, common, folder, self.random_seed, self.metric)
            runs = self.load_and_check_runs(project, search.read_points(), folder)
        return SweepQueue(self, project, folder, search, max(len(runs), self.search or 0), runs)

    def load_and_check_runs(self, project: Project, points: Sequence[Point], folder: Path) -> list[SweepPoint]:
        """Return the points' runs, with checked recipes. Raises RecipeError with all problems, each problem once."""
        problems: dict[str, Problem] = {}
        runs = []
        for point in points:
            words = point.make_run_words(folder)
            recipe = Recipe.load(self.recipe, *words, overlays=self.overlay, project=project)
            try:
                problems |= {str(problem): problem for problem in recipe.check()}
            except RecipeError as error:
                problems |= {str(problem): problem for problem in error.problems}
            state = determine_state_before_sweep(folder / point.name, recipe)
            runs.append(SweepPoint(point.name, words, recipe, state))
        if errors := [problem for problem in problems.values() if not problem.warning]:
            raise RecipeError(errors)
        self.console.print_warnings(problems.values())
        return runs

    def make_train_command(self, project: Project, words: Sequence[str]) -> list[str]:
        """Return the command to start a run with these words."""
        package = project.registry.package.partition(".")[0]
        return [sys.executable, "-m", package, *self.make_run_words(words)]

    def _default_folder(self, project: Project, point: Point) -> Path:
        """Return runs/<name>-sweep, with the name in the recipe. Raises UserError if it has none."""
        recipe = Recipe.load(self.recipe, *point.words, overlays=self.overlay, project=project)
        node = recipe.graph.nodes.get("run")
        if node is None or "name" not in node.settings:
            recipe.check(skip_machine_checks=True)
            raise UserError("the recipe has no run.name for the folder of the sweep; write one with --to FOLDER", 2)
        return Path("runs") / f"{node.settings['name']}-sweep"


@attrs.define(eq=False)
class SweepQueue:
    """
    A sweep's runs in their order; a search adds runs until there are `count`.

    `unfinished` are the runs to start, in their commands' order.
    """

    command: SweepCommand
    project: Project
    folder: Path
    search: SweepSearch | None
    count: int
    runs: list[SweepPoint]
    error: UserError | RecipeError | None = None

    @property
    def unfinished(self) -> list[SweepPoint]:
        return [run for run in self.runs if run.state != "finished"]

    def iterate_queued_and_searched_commands(self) -> Iterator[list[str]]:
        """
        Yield the commands of unfinished runs, in order; a search chooses the next run when it can start.

        An error of the search ends the iteration, and is kept in `error`, so that running processes are waited for.
        """
        try:
            for number in range(self.count):
                if self.search is not None and number == len(self.runs):
                    point = self.search.choose_and_record_point()
                    self.runs += self.command.load_and_check_runs(self.project, [point], self.folder)
                run = self.runs[number]
                if run.state == "finished":  # a search may choose a point of an earlier grid in the folder
                    print_escaped_text(f"run {number + 1} of {self.count}: {run.run} is finished")
                else:
                    yield self.command.make_train_command(self.project, run.words)
        except (UserError, RecipeError) as error:
            self.error = error

    def report_start(self, index: int) -> None:
        """Print the run that the command at this index starts."""
        run = self.unfinished[index]
        before = "" if run.state == "new" else f" ({run.state} before)"
        print_escaped_text(f"run {self.runs.index(run) + 1} of {self.count}: {run.run}{before}")

    def keep_and_print_exit_code(self, index: int, code: int) -> None:
        """Keep the exit code for the command at this index; with several jobs, print it."""
        run = self.unfinished[index]
        run.exit_code = code
        if self.command.jobs > 1:
            print_escaped_text(f"{run.run} {'has finished' if code == OK else f'ended with code {code}'}")


def _check_fit_and_print_hours(runs: Sequence[SweepPoint], device: DeviceModel) -> None:
    """Plan all runs, and print the total time. Raises UserError with the runs larger than the device."""
    plans = [(run.run, plan(run.recipe, device)) for run in runs]
    if large := [(name, planned) for name, planned in plans if not planned.fits]:
        lines = [f"  {name}: {format_decimal_byte_size(planned.peak_bytes)}" for name, planned in large]
        limit = f"{device.name} has {format_decimal_byte_size(device.memory)}" if device.memory else device.name
        raise UserError("\n".join([f"{len(large)} of {len(runs)} runs do not fit: {limit}", *lines]))
    lengths = [(count_run_length(run.recipe), planned) for run, (_, planned) in zip(runs, plans, strict=True)]
    seconds = [0.0 if length is None else length.steps * planned.time.seconds for length, planned in lengths]
    hours = f"{sum(seconds) / 3600:,.2g} hours of {device.name} in all"
    print_escaped_text(f"all runs fit; {hours}, the longest is {runs[seconds.index(max(seconds))].run}")
