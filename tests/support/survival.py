"""Runs after the loss of processes: faults on single ranks, and comparison with an undisturbed run."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.distributed import processes as joining
from drawloom.components.distributed.processes import TorchProcesses
from drawloom.components.phases.forward_backward import ForwardBackward
from drawloom.components.phases.report import Report
from drawloom.components.run.signals import Signals
from support.mutations import put
from support.processes import RanksFailedError, run_ranks
from support.runs import SOURCE, Outcome, command, drawloom, rows, write_corpus

RECIPE = """
extends = "tiny.toml"

[trainer]
steps = 8
on_finish = []

[batch]
global_size = 12
micro_size = 1

[evaluate]
every = "never"

[checkpoint]
every = "last"
"""

PLACES: dict[str, tuple[type, str]] = {
    "forward_backward": (ForwardBackward, "run_phase"),
    "report": (Report, "run_phase"),  # after the update
    "signals": (Signals, "agree_on_signal"),  # between steps
    "join": (TorchProcesses, "_join_process_group"),  # from the second call on, while groups are made again
}

FAULTS: dict[str, Callable[[], object]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "stuck": lambda: time.sleep(60),
}

Deaths = Mapping[int, tuple[str, int] | tuple[str, int, str]]


def write_recipe(folder: Path) -> Path:
    """Write a corpus and `recipe.toml`, and return the folder."""
    write_corpus(folder)
    (folder / "recipe.toml").write_text(RECIPE, "utf-8")
    return folder


def _run(folder: Path, words: tuple[str, ...], deaths: Deaths, port: int) -> Outcome:
    """Run a process, which gets a fault at the nth call of a place if `deaths` has its first rank; kills are usual."""
    put(joining, "SURVIVING_BACKENDS", ("gloo", "nccl"))
    if port:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.environ["MASTER_PORT"] = str(port)
    if (rank := int(os.environ["RANK"])) in deaths:
        place, step, *faults = deaths[rank]
        kind, name = PLACES[place]
        calls, method = [0], getattr(kind, name)

        def dying(self: Any, *arguments: Any) -> Any:
            calls[0] += 1
            if calls[0] == step:
                FAULTS[faults[0] if faults else "killed"]()
            return method(self, *arguments)

        put(kind, name, dying)
    return command(folder, ("run", "recipe.toml", *words), None)


def survive(
    folder: Path, ranks: int, deaths: Deaths, *words: str, port: int = 0
) -> tuple[dict[int, str], dict[int, Outcome]]:
    """Return how ranks died, and how the others ended. With a `port`, rank 0 hosts the store there."""
    words = ("processes.on_failure=continue", *words)
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_run, ranks, folder, words, deaths, port, timeout=90, grace=60)
    return caught.value.failures, caught.value.values


def assert_same_trajectory(folder: Path, *words: str, rel: float = 1e-5) -> None:
    """
    Assert that every step was logged once, as in an undisturbed run of one process.

    Words about the mesh and about copies are ignored.
    """
    words = tuple(word for word in words if not word.startswith(("mesh.", "checkpoint.neighbour_every")))
    [outcome] = drawloom(folder, "run", "recipe.toml", "run.name=whole", *words)
    assert outcome.code == 0, outcome
    whole, survived = rows(folder / "runs/whole"), rows(folder / "runs/tiny")
    assert [row["step"] for row in survived] == [row["step"] for row in whole]
    assert [row["step"] for row in whole] == [*range(1, len(whole) + 1)] and len(whole) >= 8
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert [row[name] for row in survived] == pytest.approx([row[name] for row in whole], rel=rel), name


WAITING = '''
import time
from pathlib import Path

from drawloom import component


@component(impact="safe")
class Waiting:
    """A phase with long steps from step 6 on, until the file `go` exists."""

    def run_phase(self, step):
        time.sleep(1.5 * (step.index > 5 and not Path("go").exists()))


[waiting]
use = "waiting"

[edit.trainer.phases]
before."@report" = ["@waiting"]
'''


def replace_worker(folder: Path, count: int, words: tuple[str, ...]) -> tuple[int, str]:
    """
    Run `drawloom launch`, kill rank 1's process and, when another one has joined, rank 0's.

    Return the exit code and the output.
    """
    code, _, recipe = WAITING.partition("[waiting]")
    (folder / "waiting.py").write_text(code, "utf-8")
    (folder / "recipe.toml").write_text(f"{RECIPE}\n[waiting]{recipe}", "utf-8")
    start = [sys.executable, "-m", "drawloom", "launch", "--nproc-per-node", str(count), "--max-restarts", "1", "run"]
    libraries = os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])  # which may have the libraries
    environment = {"PYTHONPATH": libraries, "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    with (folder / "errors").open("wb") as file:
        command = [*start, "recipe.toml", "processes.on_failure=continue", *words]
        with subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file) as launcher:
            path = folder / "runs/tiny/metrics.jsonl"
            _wait(lambda: path.exists() and path.read_bytes().count(b"\n") >= 3, launcher)
            os.kill(find_worker(launcher.pid, 1), signal.SIGKILL)
            _wait(lambda: "join" in (folder / "errors").read_text("utf-8"), launcher)
            (folder / "go").touch()
            lines = path.read_bytes().count(b"\n")
            _wait(lambda: path.read_bytes().count(b"\n") >= lines + 3, launcher)
            os.kill(find_worker(launcher.pid, 0), signal.SIGKILL)
            launcher.wait(60)
    return launcher.returncode, (folder / "errors").read_text("utf-8")


def _wait(is_done: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)


def find_worker(launcher: int, rank: int) -> int:
    """Return the process of a rank, a child of the launcher with RANK in its environment."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError("there is no such worker")
