"""run a recipe twice, once killed half-way and resumed, and compare the two runs bit by bit"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, takewhile
from pathlib import Path
from types import FrameType

import attrs
import torch

from drawloom import at_least
from drawloom.components.checkpoint.state_hashes import FOLDER
from drawloom.components.commands.runs._replay import RecordedSteps, make_rank_command, read_json_rows
from drawloom.components.report.metrics import METRICS
from drawloom.graph.cli.command import (
    FAILED,
    OK,
    Count,
    Project,
    RecipeCommand,
    Result,
    UserError,
    command,
    option,
    output,
    output_class,
)
from drawloom.graph.wiring.graph import Graph
from drawloom.ports import Device, Randomness, Tracker

DIGESTS = "digests_of_verify_resume"
HASHES = "rank-{}.jsonl"
"""Files of checkpoint.state_hashes."""
TORCHRUN_LOG = re.compile(r"[WE]\d{4} \S+ \d+ torch/")  # log lines; only torchrun's report follows its first error
MAX_TRIES = 3  # a short run may end before it can be killed


@output_class
class VerifyResumeResult(Result):
    """An uninterrupted run compared with a resumed one."""

    steps: int = output("steps of both runs")
    killed_after: int = output("last step before the kill")
    difference: str = output("first difference; empty for bit-identical runs")
    reasons: Sequence[str] = output("possible causes other than resuming")
    folder: Path | None = output("folder with both runs, if they differ")
    summary: str = output("number of compared steps and tensors, if the runs are equal")

    @property
    def exit_code(self) -> int:
        """1 if the runs differ."""
        return FAILED if self.difference else OK

    def render(self, format: str) -> str:
        """Return the verdict."""
        half = self.steps // 2
        head = f"{self.steps} steps without interruption, and {half} steps, a kill after step {self.killed_after}"
        lines = [f"{head}, and the rest:"]
        if self.difference:
            return "\n".join([*lines, self.difference, *self.reasons, f"both runs are in {self.folder}"])
        return "\n".join([*lines, f"bit-identical: {self.summary}"])


@command
class VerifyResumeCommand(RecipeCommand):
    """A comparison between two runs, at every step and tensor."""

    steps: int = option("steps to train, at least 4", default=20, check=at_least(4))
    ranks: Count = option("processes", default=1, metavar="R")

    def run(self, project: Project) -> VerifyResumeResult:
        recipe = self.load_recipe(project, self.recipe)
        recipe.check()
        graph = recipe.graph
        with _intercept_termination_signals() as signals:
            folder = Path(tempfile.mkdtemp(prefix="verify-resume-"))
            try:
                runs = Runs(folder, self._make_train_command(graph), self.steps, signals)
                runs.run_to_end("straight")
                killed = runs.kill_resume_and_get_step()
            except BaseException:
                shutil.rmtree(folder)
                raise
        half = self.steps // 2
        own = graph.implementers(Tracker)  # trackers keep a series per run
        straight, resumed = (RecordedSteps.read(folder / name, HASHES, own) for name in ("straight", "resumed"))
        if (difference := describe_first_difference(straight, resumed)) is not None:
            step, text = difference
            reasons = list(_explain_other_causes(step <= half, _is_device_nondeterministic(graph)))
            return VerifyResumeResult(self.steps, killed, f"step {step} differs: {text}", reasons, folder, "")
        shutil.rmtree(folder)
        steps, names = (step for step in straight.metrics if step), {*chain(*straight.hashes.values())}
        summary = f"{len([*steps])} steps, {len(names)} tensors and other values of the state after each"
        return VerifyResumeResult(self.steps, killed, "", [], None, summary)

    def _make_train_command(self, graph: Graph) -> list[str]:
        """Return the command for both runs, without the run folder."""
        phases = ", ".join(f'"@{name}"' for name in (*graph.nodes["trainer"].edges["phases"].targets, DIGESTS))
        words = [
            *(f"trainer.steps={self.steps}", f"trainer.phases=[{phases}]", "trainer.on_finish=[]"),
            *(f"checkpoint.every={self.steps // 2}", f"{DIGESTS}.use=checkpoint.state_hashes"),
        ]
        return [*make_rank_command(self.ranks, "drawloom"), *self.make_run_words([*self.words, *words])]


@contextmanager
def _intercept_termination_signals() -> Iterator[list[int]]:
    """
    Record terminating signals in order of arrival.

    The run is in its own session, does not receive the signals, and must be killed. A raising handler could skip the
    lines that kill a run that has just started.
    """
    received: list[int] = []

    def record(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handled = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, record)
    try:
        yield received
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)


@attrs.frozen
class Runs:
    """
    Two runs with the same command, in the subfolders `straight` and `resumed`.

    Methods kill the run and raise SystemExit when `signals` has a signal.
    """

    folder: Path
    command: list[str]
    steps: int
    signals: Sequence[int] = ()

    def kill_resume_and_get_step(self) -> int:
        """Run, kill the run when half the steps are committed, and resume it; return the last step before the kill."""
        for _ in range(MAX_TRIES):
            step = self._run_half_and_kill()
            if step < self.steps:
                self.run_to_end("resumed")
                return step
            shutil.rmtree(self.folder / "resumed")
        raise UserError(f"the run ends before it can be killed; take more steps than {self.steps} (--steps)")

    def _run_half_and_kill(self) -> int:
        """Run until half the steps are committed, kill all processes, and return the last logged step."""
        checkpoints = self.folder / "resumed" / "checkpoints"
        half = checkpoints / f"step-{self.steps // 2}"
        self._run_and_kill_when(
            "resumed", until=lambda: half.exists() and self._is_step_hashed_by_all_ranks(self.steps // 2)
        )
        if not half.exists():
            raise self._make_run_failure_error("resumed")
        if (checkpoints / f"step-{self.steps}").exists():
            return self.steps
        return max((row["step"] for row in read_json_rows(self.folder / "resumed" / METRICS)), default=self.steps // 2)

    def _is_step_hashed_by_all_ranks(self, step: int) -> bool:
        """Return whether all ranks have written a step's state hashes, perhaps after its checkpoint's commit."""
        straight, resumed = self.folder / "straight" / FOLDER, self.folder / "resumed" / FOLDER
        files = [resumed / path.name for path in straight.glob(HASHES.format("*"))]
        return all(step in {row["step"] for row in read_json_rows(path)} for path in files)

    def run_to_end(self, name: str) -> None:
        """Run the command until it ends. Raises UserError if it fails."""
        if self._run_and_kill_when(name):
            raise self._make_run_failure_error(name)

    def _run_and_kill_when(self, name: str, until: Callable[[], bool] = lambda: False) -> int:
        """Run the command, kill all its processes as soon as `until()` is true, and return the exit code."""
        command = [*self.command, f"run.folder={self.folder / name}"]
        with (
            open(self.folder / f"{name}.txt", "wb") as out,
            subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True) as process,
        ):
            while process.poll() is None and not self.signals and not until():
                time.sleep(0.001)  # short, since a step may take a few milliseconds
            if self.signals or until():
                # Kill a process group, if any process is left
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if self.signals:
            raise SystemExit(128 + self.signals[0])
        return process.returncode

    def _make_run_failure_error(self, name: str) -> UserError:
        """Return a UserError with the last lines of a failed run's output."""
        lines = (self.folder / f"{name}.txt").read_text("utf-8", "replace").splitlines()
        before_report = takewhile(lambda line: not TORCHRUN_LOG.match(line) or line.startswith("W"), lines)
        # The warning that both runs skip final tasks is not about the recipe.
        ignored = (line for line in before_report if not line.endswith("(DL322)"))
        own = [line for line in ignored if not TORCHRUN_LOG.match(line)] or lines
        return UserError("the run failed for a reason other than resuming:\n" + "\n".join(own[-20:]))


def describe_first_difference(straight: RecordedSteps, resumed: RecordedSteps) -> tuple[int, str] | None:
    """
    Return the first differing step and what differs, metrics before tensors; None for equal records.

    Both runs took all steps, so a step in only one of the records differs, too.
    """
    metrics = straight.find_different_metrics(resumed, complete=True)
    phase = straight.find_different_phase(resumed, complete=True)
    if metrics is not None and (phase is None or metrics.step <= phase.step):
        [name, (one, other)] = next(iter(metrics.values.items()))  # as text, empty for a missing value
        return metrics.step, f"{name} is {one or 'missing'} uninterrupted, {other or 'missing'} resumed"
    if phase is not None:
        more = f" and {len(phase.names) - 1} more" if len(phase.names) > 1 else ""
        return phase.step, f"{phase.names[0]}{more}"
    return None


def _is_device_nondeterministic(graph: Graph) -> bool:
    """Return whether the runs were on a GPU without deterministic algorithms, where summation order varies."""
    kinds = {graph.nodes[name].settings.get("kind") for name in graph.implementers(Device)}
    deterministic = (graph.nodes[name].settings.get("deterministic") for name in graph.implementers(Randomness))
    return ("cuda" in kinds or ("auto" in kinds and torch.cuda.is_available())) and not any(deterministic)


def _explain_other_causes(differs_before_kill: bool, device_is_nondeterministic: bool) -> Iterator[str]:
    """Yield sentences about causes other than resuming, if any is possible."""
    if differs_before_kill:
        yield "neither run was killed before this step, so resuming is not the cause: two runs of this recipe differ"
    if device_is_nondeterministic:
        cause = "the cause may be" if differs_before_kill else "resuming need not be the cause, it may be"
        yield f"{cause} the GPU, with randomness.deterministic off; try again with randomness.deterministic=true"
