"""run a recipe twice, once killed half-way and resumed, and compare the two runs bit by bit"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import attrs
import torch

from drawloom.components.commands._options import integer
from drawloom.components.ports.distributed import Device
from drawloom.components.ports.run import Randomness, Tracker
from drawloom.components.storage.step_log import read_steps
from drawloom.graph import UserError
from drawloom.graph.cli.terminal import print_text
from drawloom.graph.project import Project, Recipe
from drawloom.graph.wiring.graph import Graph

DIGESTS = "digests_of_verify_resume"
# metrics of the machine, not of the training: themselves, or what is before a slash
MACHINE_METRICS = {"tokens_per_second", "device_tokens_per_second", "tflops", "mfu", "memory", "seconds"}
TORCHRUN_LOG = re.compile(r"[WE]\d{4} \S+ \d+ torch/")  # its log lines; after its first error only its report follows
TRIES = 3  # a short run may be over before it can be killed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("recipe", metavar="RECIPE", help="a path, or the name of a shipped recipe")
    parser.add_argument("--overlay", action="append", default=[], metavar="FILE", help="a recipe to merge over it")
    parser.add_argument("--steps", type=integer(4), default=20, metavar="N", help="steps, at least 4 (default 20)")
    parser.add_argument("--ranks", type=integer(), default=1, metavar="R", help="processes to run it in (default 1)")
    parser.epilog = "Set single values with node.key=value."


def main(options: argparse.Namespace, project: Project) -> int:
    """Print that the runs are equal, or the first step and tensor that differ; return 1 then."""
    recipe = Recipe.load(options.recipe, *options.words, overlays=options.overlay, project=project)
    recipe.check()
    graph = recipe.graph
    with _signals_noted() as noted:
        place = Path(tempfile.mkdtemp(prefix="verify-resume-"))
        try:
            runs = Runs(place, _command(options, graph), options.steps, noted)
            runs.straight()
            killed = runs.killed_and_resumed()
        except BaseException:
            shutil.rmtree(place)
            raise
    half = options.steps // 2
    print_text(
        f"{options.steps} steps without interruption, and {half} steps, a kill after step {killed}, and the rest:"
    )
    own = graph.implementers(Tracker)  # trackers keep a series per run
    difference = next(differences(place / "straight", place / "resumed", own), None)
    if difference is not None:
        print_text("\n".join([str(difference), *_reasons(difference.step <= half, _device_varies(graph))]))
        print_text(f"both runs are in {place}")
        return 1
    print_text(f"bit-identical: {_compared(place / 'straight')}")
    shutil.rmtree(place)
    return 0


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """
    The signals to end that arrive, in order. The run, in a session of its own, gets none and has to be killed.

    A handler that raised could do so between the start of the run and the lines that kill it.
    """
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        noted.append(number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    handled = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in handled:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in handled.items():
            signal.signal(number, handler)


@attrs.frozen
class Runs:
    """
    Two runs of a command, in the subfolders `straight` and `resumed` of `place`.

    Raises SystemExit, after killing the run, when there is a signal in `noted`.
    """

    place: Path
    command: list[str]
    steps: int
    noted: Sequence[int] = ()

    def straight(self) -> None:
        """Run without interruption."""
        self._finish("straight")

    def killed_and_resumed(self) -> int:
        """Run, kill the run when half of its steps are committed, and resume it; the last step logged before."""
        for _ in range(TRIES):
            step = self._kill()
            if step < self.steps:
                self._finish("resumed")
                return step
            shutil.rmtree(self.place / "resumed")
        raise UserError(f"the run ends before it can be killed; take more steps than {self.steps} (--steps)")

    def _kill(self) -> int:
        """Start the run, and kill all of its processes when half of the steps are committed."""
        checkpoints = self.place / "resumed" / "checkpoints"
        half = checkpoints / f"step-{self.steps // 2}"
        self._run("resumed", until=lambda: half.exists() and self._is_hashed(self.steps // 2))
        if not half.exists():
            raise self._failed("resumed")
        if (checkpoints / f"step-{self.steps}").exists():
            return self.steps
        return max((row["step"] for row in _rows(self.place / "resumed" / "metrics.jsonl")), default=self.steps // 2)

    def _is_hashed(self, step: int) -> bool:
        """Whether all ranks have written the digests of a step, which goes on while its checkpoint is committed."""
        files = (self.place / "straight" / "digests").glob("rank-*.jsonl")
        return all(step in _digests(self.place / "resumed" / "digests" / path.name) for path in files)

    def _finish(self, name: str) -> None:
        if self._run(name):
            raise self._failed(name)

    def _run(self, name: str, until: Callable[[], bool] = lambda: False) -> int:
        """Run the command to its end, and kill all of its processes as soon as `until()`; the exit code."""
        command = [*self.command, f"run.folder={self.place / name}"]
        with (
            open(self.place / f"{name}.txt", "wb") as out,
            subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True) as process,
        ):
            while process.poll() is None and not self.noted and not until():
                time.sleep(0.001)  # short, since a step may take a few milliseconds
            if self.noted or until():
                _kill_all(process.pid)
        if self.noted:
            raise SystemExit(128 + self.noted[0])
        return process.returncode

    def _failed(self, name: str) -> UserError:
        lines = (self.place / f"{name}.txt").read_text("utf-8", "replace").splitlines()
        before_report = takewhile(lambda line: not TORCHRUN_LOG.match(line) or line.startswith("W"), lines)
        # Final tasks are left out of both runs, which says nothing of the recipe.
        ignored = (line for line in before_report if not line.endswith("(DL322)"))
        own = [line for line in ignored if not TORCHRUN_LOG.match(line)] or lines
        return UserError("the run failed for a reason other than resuming:\n" + "\n".join(own[-20:]))


def _kill_all(group: int) -> None:
    """Kill the processes of a group, if any is left."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


@attrs.frozen
class Difference:
    """A value that differs between the runs after a step."""

    step: int
    what: str

    def __str__(self) -> str:
        return f"step {self.step} differs: {self.what}"


def differences(one: Path, other: Path, own: Collection[str] = ()) -> Iterator[Difference]:
    """The differences of two runs in order of steps: metrics, then tensors, without those of the nodes `own`."""
    tensors = sorted(path.name for path in (one / "digests").glob("rank-*.jsonl"))
    ours, theirs = ({row["step"]: row for row in _rows(run / "metrics.jsonl")} for run in (one, other))
    digests = [[_digests(run / "digests" / name, own) for run in (one, other)] for name in tensors]
    for step in sorted({*ours, *theirs, *(step for pair in digests for each in pair for step in each)}):
        yield from _numbers(step, ours.get(step, {}), theirs.get(step, {}))
        for name, (mine, yours) in zip(tensors, digests, strict=True):
            yield from _tensors(step, name.removesuffix(".jsonl"), mine.get(step, {}), yours.get(step, {}))


def _numbers(step: int, mine: Mapping[str, Any], yours: Mapping[str, Any]) -> Iterator[Difference]:
    for name in (key for key in {**mine, **yours} if key.partition("/")[0] not in MACHINE_METRICS):
        if mine.get(name, "missing") != yours.get(name, "missing"):
            values = f"{mine.get(name, 'missing')} uninterrupted, {yours.get(name, 'missing')} resumed"
            yield Difference(step, f"{name} is {values}")


def _tensors(step: int, rank: str, mine: Mapping[str, str], yours: Mapping[str, str]) -> Iterator[Difference]:
    if other := [name for name in {**mine, **yours} if mine.get(name) != yours.get(name)]:
        more = f" and {len(other) - 1} more" if len(other) > 1 else ""
        yield Difference(step, f"{other[0]}{more} of {rank.replace('-', ' ')}")


def _device_varies(graph: Graph) -> bool:
    """Whether the runs were on a GPU without deterministic algorithms: some operations then add in varying order."""
    kinds = {graph.nodes[name].settings.get("kind") for name in graph.implementers(Device)}
    deterministic = (graph.nodes[name].settings.get("deterministic") for name in graph.implementers(Randomness))
    return ("cuda" in kinds or ("auto" in kinds and torch.cuda.is_available())) and not any(deterministic)


def _reasons(before_the_kill: bool, device_varies: bool) -> Iterator[str]:
    """Other possible causes than resuming: before the kill, both runs did the same."""
    if before_the_kill:
        yield "neither run was killed before this step, so resuming is not the cause: two runs of this recipe differ"
    if device_varies:
        cause = "the cause may be" if before_the_kill else "resuming need not be the cause, it may be"
        yield f"{cause} the GPU, with randomness.deterministic off; try again with randomness.deterministic=true"


def _command(options: argparse.Namespace, graph: Graph) -> list[str]:
    """The command of both runs, without the folder that they write to."""
    phases = ", ".join(f'"@{name}"' for name in (*graph.nodes["trainer"].edges["phases"].targets, DIGESTS))
    words = [
        *(f"trainer.steps={options.steps}", f"trainer.phases=[{phases}]", "trainer.on_finish=[]"),
        *(f"checkpoint.every={options.steps // 2}", f"{DIGESTS}.use=checkpoint.state_hashes"),
    ]
    overlays = [word for path in options.overlay for word in ("--overlay", path)]
    imports = [word for package in options.imports for word in ("--import", package)]
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={options.ranks}", "-m"]
    module = [*(launcher if options.ranks > 1 else []), "drawloom"]
    return [sys.executable, "-m", *module, "run", options.recipe, *overlays, *imports, *options.words, *words]


def _compared(run: Path) -> str:
    steps = sum(row["step"] > 0 for row in _rows(run / "metrics.jsonl"))
    names = {name for path in (run / "digests").iterdir() for row in _digests(path).values() for name in row}
    return f"{steps} steps, {len(names)} tensors and other values of the state after each"


def _digests(path: Path, own: Collection[str] = ()) -> dict[int, dict[str, str]]:
    """The hashes by step and name, without those of the nodes `own`."""
    rows = {row["step"]: row["digests"].items() for row in _rows(path)}
    return {step: {name: digest for name, digest in row if name.split("/")[0] not in own} for step, row in rows.items()}


def _rows(path: Path) -> list[dict[str, Any]]:
    return [line.row for line in read_steps(path)[0]]
