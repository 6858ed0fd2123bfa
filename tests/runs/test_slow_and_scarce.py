"""Runs on a slow disk, with a clock that jumps, and with a limit of processes."""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.disk import Call, watch_calls
from support.processes import run_ranks
from support.runs import SOURCE, Outcome, command, drawloom, series, take_back, write_corpus

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
NOBODY = 65534

LEARNED = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")
RUN = ("run", "tiny.toml", "sample.tokens=2")


def _on_a_slow_disk(folder: Path, arguments: Sequence[str]) -> Outcome:
    """A run in which every fsync of a file takes a tenth of a second."""

    def slow(call: Call) -> None:
        if call.name == "fsync":
            time.sleep(0.1)

    with watch_calls(slow):
        return command(folder, arguments, None)


def test_a_slow_disk_changes_nothing(place: Path) -> None:
    """A save takes longer than many steps; all are committed, and the run learns what it learns on a fast disk."""
    words = (*RUN, "staging.use=checkpoint.staging.overlapped", "checkpoint.every=2")
    [slow] = run_ranks(_on_a_slow_disk, 1, place, (*words, "run.name=slow"), variables=False)
    [fast] = drawloom(place, *words, "run.name=fast")
    assert (slow.code, fast.code) == (0, 0), slow.text
    assert "skipped" not in slow.text
    found = [series(place / "runs" / name, *LEARNED) for name in ("slow", "fast")]
    assert found[0] == found[1] and len(found[0]) == 10


@pytest.mark.soak
@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed (Debian: libfaketime)")
def test_a_clock_that_jumps_changes_nothing(place: Path) -> None:
    """Half of a run three years ahead, at a hundred times the speed, the rest three years ago: as if none were."""
    assert drawloom(place, *RUN, "run.name=plain")[0].code == 0
    _at("+3y x100", place)
    run = place / "runs" / "tiny"
    take_back(run, 8)
    text = _at("-3y", place)
    assert "resuming after step 8" in text and "checkpoint saved" in text
    assert series(run, *LEARNED) == series(place / "runs" / "plain", *LEARNED)


def _at(offset: str, folder: Path) -> str:
    """What a run prints whose wall clock is off by so much; the monotonic clock and times of files are real."""
    env = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], "LD_PRELOAD": str(FAKETIME)}
    env |= {"FAKETIME": offset, "DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}
    done = subprocess.run([sys.executable, "-m", "drawloom", *RUN], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _as_nobody(folder: Path, arguments: Sequence[str]) -> Outcome:
    """A run of a user who may have no process or thread but this one; root is exempt from that limit."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    return command(folder, arguments, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="root is needed to become another user, who has no process yet")
def test_a_limit_of_processes_of_a_user_is_told() -> None:
    """`ulimit -u` is named, without a traceback."""
    folder = Path(tempfile.gettempdir(), f"drawloom-nobody-{os.getpid()}")
    folder.mkdir(mode=0o777)
    try:
        write_corpus(folder)
        os.chmod(folder, 0o777)
        [outcome] = run_ranks(_as_nobody, 1, folder, RUN, variables=False)
    finally:
        shutil.rmtree(folder)
    assert outcome.code == 1 and "no more threads can be started" in outcome.text, outcome
    assert "ulimit -u" in outcome.text and "Traceback" not in outcome.text
