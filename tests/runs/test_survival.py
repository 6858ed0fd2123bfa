"""Runs that continue in memory after the loss of processes (`processes.on_failure`)."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a corpus and the recipe."""
    write_corpus(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE, "utf-8")
    return tmp_path


def _run(folder: Path, words: tuple[str, ...], deaths: Deaths) -> Outcome:
    """Run a process, which gets a fault at the nth call of a place if `deaths` has its first rank; kills are usual."""
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


def _survive(folder: Path, ranks: int, deaths: Deaths, *words: str) -> tuple[dict[int, str], dict[int, Outcome]]:
    """Return how ranks died, and how the others ended."""
    words = ("processes.on_failure=continue", *words)
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_run, ranks, folder, words, deaths, timeout=90, grace=60)
    return caught.value.failures, caught.value.values


def _assert_same_trajectory(folder: Path, *words: str) -> None:
    """Assert that every step was logged once, as in an undisturbed run of one process."""
    [outcome] = drawloom(folder, "run", "recipe.toml", "run.name=whole", *words)
    assert outcome.code == 0, outcome
    whole, survived = rows(folder / "runs/whole"), rows(folder / "runs/tiny")
    assert [row["step"] for row in survived] == [row["step"] for row in whole]
    assert [row["step"] for row in whole] == [*range(1, len(whole) + 1)] and len(whole) >= 8
    for name in ("loss", "grad_norm", "lr", "tokens"):
        assert [row[name] for row in survived] == pytest.approx([row[name] for row in whole], rel=1e-5), name


def test_a_run_survives_one_loss_after_another(folder: Path) -> None:
    """Rank 0 dies in a forward pass, later the next rank 0 after an update; the last rank computes the same."""
    deaths = {0: ("forward_backward", 3), 1: ("report", 6)}
    failures, outcomes = _survive(folder, 3, deaths)
    assert failures == dict.fromkeys(deaths, "died with exit code -9") and [*outcomes] == [2]
    assert outcomes[2].code == 0, outcomes
    text = "".join(path.read_text("utf-8") for path in (folder / "runs/tiny/log").iterdir())
    assert "rank 0" in text and "2 of 3 processes continue" in text and "1 of 2 processes continue" in text
    assert {*re.findall(r"restored the state after step (\d) from memory", text)} == {"2", "5"}
    _assert_same_trajectory(folder)


def test_hanging_ranks_and_a_loss_while_groups_are_made_are_survived(folder: Path) -> None:
    """
    Rank 0 is stopped, rank 1 dies while the others make groups again, and rank 2 is stuck in Python later.

    Hanging ranks are killed, so that they do not come back, and the last rank computes the same.
    """
    deaths: Deaths = {0: ("forward_backward", 3, "stopped"), 1: ("join", 2), 2: ("report", 5, "stuck")}
    words = "processes.heartbeat_timeout=3", "listeners.timeouts.step=4"
    start = time.monotonic()
    failures, outcomes = _survive(folder, 4, deaths, *words)
    assert time.monotonic() - start < 45 and failures == dict.fromkeys(deaths, "died with exit code -9")
    assert outcomes[3].code == 0, outcomes
    text = "".join(path.read_text("utf-8") for path in (folder / "runs/tiny/log").iterdir())
    assert "has sent no heartbeat for 3 s" in text and "hangs in step 5, phase [report]" in text
    _assert_same_trajectory(folder)


@pytest.mark.parametrize(
    ("words", "place", "step"),
    [
        (("mesh.data_shard=2",), "forward_backward", 5),
        pytest.param(("mesh.pipeline=2", "model.num_hidden_layers=2"), "forward_backward", 5, marks=pytest.mark.soak),
        pytest.param(("batch.global_size=8",), "signals", 4, marks=pytest.mark.soak),
    ],
    ids=["shards", "pipeline", "uneven"],
)
def test_a_replica_leaves_as_a_whole(folder: Path, words: tuple[str, ...], place: str, step: int) -> None:
    """
    Of four ranks two continue: the other replica, or as many replicas as divide the step's microbatches.

    The third rank waits as a spare, and ends with the run.
    """
    failures, outcomes = _survive(folder, 4, {1: (place, step)}, *words)
    assert failures == {1: "died with exit code -9"}
    assert [outcome.code for outcome in outcomes.values()] == [0, 0, 0]
    text = "".join(path.read_text("utf-8") for path in (folder / "runs/tiny/log").iterdir())
    assert text.count("2 of 4 processes continue") == 3
    _assert_same_trajectory(folder, *(word for word in words if not word.startswith("mesh.")))


def test_without_a_complete_replica_the_run_ends(folder: Path) -> None:
    """The killed rank is named once, as in a run that stops."""
    failures, outcomes = _survive(folder, 2, {1: ("forward_backward", 3)}, "mesh.data_shard=2")
    assert failures == {1: "died with exit code -9"} and outcomes[0].code == 1
    assert "rank 1" in outcomes[0].text and outcomes[0].text.count("is gone") == 1
    assert "continue" not in outcomes[0].text


WAITING = '''
import time
from pathlib import Path

from drawloom import component


@component(impact="safe")
class Waiting:
    """A phase that takes long from step 6 on, until the file `go` exists."""

    def run_phase(self, step):
        time.sleep(1.5 * (step.index > 5 and not Path("go").exists()))


[waiting]
use = "waiting"

[edit.trainer.phases]
before."@report" = ["@waiting"]
'''


@pytest.mark.parametrize("words", [(), pytest.param(("mesh.data_shard=2",), marks=pytest.mark.soak)])
def test_the_launcher_replaces_a_lost_worker(folder: Path, words: tuple[str, ...]) -> None:
    """
    A worker is killed from outside, and its successor joins the run; the first worker is killed, and the others go on.

    Every step's numbers are those of an undisturbed run, and the launcher exits with 0.
    """
    code, _, recipe = WAITING.partition("[waiting]")
    (folder / "waiting.py").write_text(code, "utf-8")
    (folder / "recipe.toml").write_text(f"{RECIPE}\n[waiting]{recipe}", "utf-8")
    count, replica = 2 * 2 ** len(words), 2 ** len(words)
    words = ("trainer.steps=40", "--import=waiting.py", *words)
    start = [sys.executable, "-m", "drawloom", "launch", "--nproc-per-node", str(count), "--max-restarts", "1", "run"]
    environment = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    with (folder / "errors").open("wb") as file:
        command = [*start, "recipe.toml", "processes.on_failure=continue", *words]
        with subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file) as launcher:
            path = folder / "runs/tiny/metrics.jsonl"
            _wait(lambda: path.exists() and path.read_bytes().count(b"\n") >= 3, launcher)
            os.kill(_worker(launcher.pid, 1), signal.SIGKILL)
            _wait(lambda: "join" in (folder / "errors").read_text("utf-8"), launcher)
            (folder / "go").touch()
            lines = path.read_bytes().count(b"\n")
            _wait(lambda: path.read_bytes().count(b"\n") >= lines + 3, launcher)
            os.kill(_worker(launcher.pid, 0), signal.SIGKILL)
            launcher.wait(60)
    errors = (folder / "errors").read_text("utf-8")
    assert launcher.returncode == 0 and "Traceback" not in errors, errors
    assert errors.count(f"{replica} of {count} processes continue") == 2, errors
    assert errors.count(f"{replica} of {replica} processes continue; {replica} process") == 1, errors
    _assert_same_trajectory(folder, *(word for word in words if not word.startswith("mesh.")))


def _wait(is_done: Callable[[], bool], process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 60
    while not is_done():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)


def _worker(launcher: int, rank: int) -> int:
    """Return the process of a rank, a child of the launcher with RANK in its environment."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise AssertionError("there is no such worker")
