"""A rank fails: all others end with it, soon, and one message says which rank it was, where, and why."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from drawloom.components.phases.forward_backward import ForwardBackward
from drawloom.components.ports.run import Step
from drawloom.graph import UserError
from support.mutations import put
from support.processes import RanksFailed, run_ranks
from support.runs import Outcome, command, write_corpus

SOURCE = str(Path(__file__).parents[2] / "src")
LONG = ("run", "tiny.toml", "batch.global_size=6", "batch.micro_size=1", "trainer.steps=1000000")
RUN = (*LONG, "checkpoint.every='last'", "evaluate.every='never'", "trainer.on_finish=[]")
LIMITS = ("listeners.timeouts.step=2", "listeners.timeouts.first_step=30")
WHERE = "step 4, phase [forward_backward]"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a corpus and the tiny recipe."""
    write_corpus(tmp_path)
    return tmp_path


def _refuse() -> None:
    raise UserError("there is no luck today", exit_code=2)


DEEDS: dict[str, Callable[[], object]] = {
    "refuse": _refuse,
    "refuse and hang": _refuse,
    "fault": lambda: 1 / 0,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
}


def _one_fails(folder: Path, arguments: Sequence[str], deed: str, rank: int) -> Outcome:
    """A process of a run; in step 4 one rank does something that ends it, or keeps the others waiting."""
    run, mine = ForwardBackward.run_phase, int(os.environ["RANK"]) == rank
    if deed == "refuse and hang" and mine:
        put(ForwardBackward, "close", lambda _: time.sleep(60))

    def failing(self: ForwardBackward, step: Step) -> None:
        if step.index == 4 and mine:
            (folder / "failed").touch()
            DEEDS[deed]()
        run(self, step)

    put(ForwardBackward, "run_phase", failing)
    return command(folder, arguments, None)


def _ended(place: Path, ranks: int, deed: str, *words: str) -> tuple[dict[int, str], dict[int, Outcome], float]:
    """How ranks died, how they ended, and after how many seconds all but the one that failed had ended."""
    lost = {1} if deed == "stop" else set()
    try:
        found = run_ranks(_one_fails, ranks, place, (*RUN, *words), deed, 1, timeout=60, lost=lost)
        failures, values = {}, dict(enumerate(found))
    except RanksFailed as failed:
        failures, values = failed.failures, failed.values
    return failures, values, time.time() - (place / "failed").stat().st_mtime


def _told(outcomes: dict[int, Outcome]) -> list[str]:
    """The lines that all ranks printed, but for those of steps and warnings of the recipe."""
    lines = [line for outcome in outcomes.values() for line in outcome.text.splitlines()]
    return [line for line in lines if not line.startswith("step ") and ": warning: [" not in line]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_mistake_is_told_once_with_rank_and_place(place: Path, ranks: int) -> None:
    """All ranks end with its exit code, and their logs say because of whom; a warning of the recipe comes once, too."""
    failures, outcomes, seconds = _ended(place, ranks, "refuse")
    assert failures == {} and [outcome.code for outcome in outcomes.values()] == [2] * ranks
    assert _told(outcomes) == [f"rank 1, {WHERE}: there is no luck today"]
    assert sum(outcome.text.count("warning: [export]") for outcome in outcomes.values()) == 1
    assert "there is no luck today" in (place / "runs/tiny/log/rank-0.log").read_text()
    assert seconds < 5


def test_a_rank_that_hangs_while_it_closes_keeps_nobody(place: Path) -> None:
    """The others don't wait for its connections to break, and it is ended itself."""
    failures, outcomes, seconds = _ended(place, 2, "refuse and hang")
    assert failures == dict.fromkeys(failures, "died with exit code 2") and 1 in failures
    assert seconds < 5
    assert "no luck" in (place / "runs/tiny/log/rank-0.log").read_text()
    assert _told(outcomes) == []  # what rank 1 printed is lost with it


def test_a_fault_of_the_program_is_told_once_with_its_traceback(place: Path) -> None:
    """On the terminal, and in the log of the rank in which it is."""
    failures, outcomes, seconds = _ended(place, 3, "fault")
    assert failures == {} and [outcome.code for outcome in outcomes.values()] == [1] * 3
    told = _told(outcomes)
    assert told[0].startswith("Traceback") and told.count(told[0]) == 1
    assert told[-1] == f"rank 1, {WHERE}: ZeroDivisionError: division by zero"
    assert "Traceback" in outcomes[1].text and "Traceback" in (place / "runs/tiny/log/rank-1.log").read_text()
    assert seconds < 5


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_is_killed_is_named_once(place: Path, ranks: int) -> None:
    """By one of the others; none says that connections were reset."""
    failures, outcomes, seconds = _ended(place, ranks, "kill")
    assert failures == {1: "died with exit code -9"} and {outcome.code for outcome in outcomes.values()} == {1}
    [told] = _told(outcomes)
    assert re.fullmatch(r"rank 1 \(process \d+\) is gone: it was killed, or it crashed", told)
    assert seconds < 5


def test_a_rank_that_stands_still_is_named_once(place: Path) -> None:
    """At the limit of a step, by one of the others."""
    failures, outcomes, seconds = _ended(place, 3, "stop", *LIMITS)
    assert failures == {1: "was not waited for"} and {outcome.code for outcome in outcomes.values()} == {1}
    [told] = [line for line in _told(outcomes) if "is slow" not in line]
    assert "rank 1 does not answer" in told and "step 4, phase [" in told
    assert 2 <= seconds < 9


def test_torchrun_is_given_one_message(place: Path) -> None:
    """
    A fault that every rank finds is printed once. torchrun's own table can't be kept from coming after it; its cause is
    ours.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    words = [*torchrun, "-m", "drawloom", *RUN, "optimizer.lr=-1"]
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=120)
    before, _, after = done.stderr.partition("Traceback (most recent call last)")
    cause = after.partition("Root Cause")[2]
    assert done.returncode == 1
    assert before.count("[optimizer] lr: -1.0 is not above 0") == 1
    assert "rank      : 0 " in cause and "traceback : command line: [optimizer] lr" in cause
