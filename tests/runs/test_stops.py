"""Runs that are stopped while they are busy, and slow saves, with real processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest

from drawloom.components.checkpoint import commit
from drawloom.components.checkpoint.commit import list_checkpoints, step_of_checkpoint
from drawloom.components.data.loader import Loader
from drawloom.components.phases.forward_backward import ForwardBackward
from drawloom.components.sampling.sample import Sample
from support.crashes import is_valid
from support.mutations import put
from support.processes import RanksFailedError, run_ranks
from support.runs import SOURCE, Outcome, command, drawloom, rows

TWO = ("run", "tiny.toml", "batch.micro_size=2", "trainer.on_finish=[]", "evaluate.every='never'")
ENDLESS_SECONDS = 1000.0


def _delay(owner: Any, name: str, seconds: float, condition: Callable[..., bool], on_match: Callable[[], None]) -> None:
    """Make a function slower when it is called with certain arguments."""
    call = getattr(owner, name)

    @wraps(call)
    def call_slowly(*arguments: Any) -> Any:
        if condition(*arguments):
            on_match()
            time.sleep(seconds)
        return call(*arguments)

    put(owner, name, call_slowly)


def _schedule_signals(times: Sequence[float]) -> None:
    """Send Ctrl-C's signal to this process at these times, in seconds."""
    for seconds in times:
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()


def _run_stuck(folder: Path, arguments: Sequence[str], where: str, times: Sequence[float]) -> Outcome:
    """
    Run the command in this rank's process. Rank 1 hangs in step 6 or in the save after it.

    From there, both ranks get Ctrl-C's signal after `times`, in seconds.
    """
    number, send = int(os.environ["RANK"]), partial(_schedule_signals, times)
    if where == "step":
        _delay(ForwardBackward, "run_phase", ENDLESS_SECONDS if number else 0, lambda _, step: step.index == 6, send)
    else:
        _delay(
            commit,
            "write_files_of_rank",
            ENDLESS_SECONDS if number else 0,
            lambda temp, *_: temp.name == ".tmp-step-6",
            send,
        )
    return command(folder, arguments, None)


@pytest.mark.soak
@pytest.mark.parametrize("where", ["step", "save"])
@pytest.mark.parametrize(("times", "grace"), [((0.1,), 1.5), ((0.1, 1.4), 60)])
def test_a_run_that_does_not_stop_in_time_is_killed(
    folder: Path, where: str, times: Sequence[float], grace: float
) -> None:
    """Both ranks exit after the grace period or at a second signal, and the last commit is intact."""
    arguments = (*TWO, "trainer.steps=8", "checkpoint.every=3", f"stop.grace={grace}")
    began = time.monotonic()
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_run_stuck, 2, folder, arguments, where, times, timeout=20)
    assert {*caught.value.failures.values()} == {"died with exit code 130"}
    assert time.monotonic() - began < 15
    saved = list_checkpoints(folder / "runs/tiny/checkpoints")
    assert [step_of_checkpoint(path) for path in saved] == [3] and all(map(is_valid, saved))


def _run_with_stuck_component(folder: Path, arguments: Sequence[str], stage: str) -> Outcome:
    """Run on one rank; the last rank hangs while the loader is opened or closed."""
    last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    _delay(Loader, stage, ENDLESS_SECONDS if last else 0, lambda *_: True, lambda: None)
    return command(folder, arguments, None)


@pytest.mark.soak
@pytest.mark.parametrize(("ranks", "stage"), [(1, "open"), (1, "close"), (2, "open")])
def test_a_component_that_hangs_in_open_or_close_is_named_and_ends_the_run(
    folder: Path, ranks: int, stage: str
) -> None:
    """All ranks end within the limit, and their logs name the component that hangs."""
    arguments = (
        *TWO[:2],
        f"batch.micro_size={4 // ranks}",
        *TWO[3:],
        "listeners.timeouts.opening=1",
        "trainer.steps=2",
    )
    with pytest.raises(RanksFailedError) as caught:
        run_ranks(_run_with_stuck_component, ranks, folder, arguments, stage, timeout=40, variables=ranks > 1)
    assert caught.value.failures[ranks - 1] == "died with exit code 1"
    logs = [(folder / f"runs/tiny/log/rank-{rank}.log").read_text("utf-8") for rank in range(ranks)]
    assert f"rank {ranks - 1} hangs: {stage}() of [data] took more than 1 s" in logs[-1]
    assert all(f"{stage}() of [data]" in text for text in logs)


HOLD = '''
import re

from drawloom import component
from drawloom.components.data.text_files import TextFiles


@component(impact="changes_training")
class Hold(TextFiles):
    """A corpus whose regular expression never ends, and holds the interpreter's lock."""

    def open(self):
        re.match("(a+)+$", "a" * 60 + "b")
'''


SLEEP = '''
import time

from drawloom import component
from drawloom.components.distributed.mesh import RankMesh


@component(impact="safe")
class Sleep(RankMesh):
    """A mesh that waits for ranks that never come."""

    def open(self):
        time.sleep(600)
'''


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "text", "words", "message"),
    [
        (
            "hold",
            HOLD,
            ["corpus.use=hold", "corpus.paths=['corpus/*']"],
            "rank 0 hangs: open() of [corpus] took more than 1 s, and keeps Python's threads",
        ),
        ("sleep", SLEEP, ["mesh.use=sleep"], "rank 0 hangs: open() of [mesh] took more than 1 s\n"),
    ],
)
def test_a_component_that_no_thread_can_end_is_named_and_killed(
    folder: Path, name: str, text: str, words: list[str], message: str
) -> None:
    """The guard ends a component that blocks the interpreter or opens before the watchdog, and prints the stack."""
    (folder / f"{name}.py").write_text(text, "utf-8")
    words = ["run", "tiny.toml", "--import", f"{name}.py", *words, "listeners.timeouts.opening=1"]
    environment = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    process = [sys.executable, "-m", "drawloom", *words]
    done = subprocess.run(process, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert message in done.stderr
    assert f"{name}.py" in done.stderr.partition("rank 0 hangs")[2]


def _run_and_stop_while_sampling(folder: Path, arguments: Sequence[str]) -> Outcome:
    """Run, and send Ctrl-C's signal while the run samples."""
    _delay(Sample, "run_after_training", 0, lambda *_: True, partial(_schedule_signals, (0.3,)))
    return command(folder, arguments, None)


def test_a_signal_ends_a_long_sample_at_once(folder: Path) -> None:
    """Both ranks exit before the grace period with the signal's code, and a rerun completes the sample."""
    words = (
        *TWO[:3],
        "mesh.pipeline=2",
        "model.num_hidden_layers=2",
        "trainer.steps=2",
        "trainer.on_finish=['@sample']",
    )
    began = time.monotonic()
    outcomes = run_ranks(_run_and_stop_while_sampling, 2, folder, (*words, "sample.tokens=1000000"), timeout=60)
    assert [outcome.code for outcome in outcomes] == [130, 130] and time.monotonic() - began < 20
    assert "stopped by signal 2 after training; the same command completes the run" in outcomes[0].text
    assert not any("Traceback" in outcome.text for outcome in outcomes)
    assert {outcome.code for outcome in drawloom(folder, *words, ranks=2)} == {0}
    assert (folder / "runs/tiny/sample.txt").exists() and len(rows(folder / "runs/tiny")) == 2


def _run_with_slow_save(folder: Path, arguments: Sequence[str], seconds: float) -> Outcome:
    """Run on one rank; rank 1 writes checkpoints slowly."""
    slow = os.environ["RANK"] == "1"
    _delay(commit, "write_files_of_rank", seconds, lambda temp, *_: slow and temp.name == ".tmp-step-2", lambda: None)
    return command(folder, arguments, None)


@pytest.mark.parametrize("staging", ["none", pytest.param("blocking", marks=pytest.mark.soak)])
def test_a_slow_save_of_one_rank_is_not_a_failure(folder: Path, staging: str) -> None:
    """A save longer than a step's limit makes other ranks wait, with and without staging."""
    limits = ("listeners.timeouts.step=0.5", "listeners.timeouts.saving=30", "listeners.timeouts.first_step=30")
    words = (*TWO, *limits, "trainer.steps=3", "checkpoint.every=2", f"staging.use=checkpoint.staging.{staging}")
    outcomes = run_ranks(_run_with_slow_save, 2, folder, words, 3.3)
    assert [outcome.code for outcome in outcomes] == [0, 0]
    assert [step_of_checkpoint(path) for path in list_checkpoints(folder / "runs/tiny/checkpoints")] == [2, 3]
    assert len(rows(folder / "runs/tiny")) == 3


@pytest.mark.parametrize("staging", [pytest.param("none", marks=pytest.mark.soak), "blocking"])
def test_a_save_that_hangs_ends_within_its_limit(folder: Path, staging: str) -> None:
    """Other ranks name the rank with the hanging disk."""
    limits = ("listeners.timeouts.step=1", "listeners.timeouts.saving=1", "listeners.timeouts.first_step=30")
    words = (*TWO, *limits, "trainer.steps=9", "checkpoint.every=2", f"staging.use=checkpoint.staging.{staging}")
    began = time.monotonic()
    with pytest.raises(RanksFailedError):
        run_ranks(_run_with_slow_save, 2, folder, words, ENDLESS_SECONDS, timeout=20)
    assert time.monotonic() - began < 15
    ours, theirs = ((folder / f"runs/tiny/log/rank-{rank}.log").read_text("utf-8") for rank in (0, 1))
    assert "rank 0 hangs" in ours and "phase [checkpoint]) is not in a collective" in ours and "; rank 1 (" in ours
    assert "rank 1 hangs" in theirs and "; rank 0 (" not in theirs
