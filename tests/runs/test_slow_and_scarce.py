"""Runs on a slow disk, with a clock that jumps, and with a limit of processes."""

import ctypes
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.disk import Call, watch_calls
from support.processes import run_ranks
from support.runs import SOURCE, Outcome, command, drawloom, series, take_back

FAKETIME = next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)
NOBODY = 65534

LEARNED = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss")
RUN = ("run", "tiny.toml", "sample.tokens=2")


def _run_on_slow_disk(folder: Path, arguments: Sequence[str]) -> Outcome:
    """Run with a tenth of a second of delay in every fsync."""

    def wait(call: Call) -> None:
        if call.name == "fsync":
            time.sleep(0.1)

    with watch_calls(wait):
        return command(folder, arguments, None)


@pytest.mark.soak
def test_a_slow_disk_changes_nothing(folder: Path) -> None:
    """Saves longer than many steps are all committed, and metrics equal those on a fast disk."""
    words = (*RUN, "staging.use=checkpoint.staging.overlapped", "checkpoint.every=2")
    [slow] = run_ranks(_run_on_slow_disk, 1, folder, (*words, "run.name=slow"), variables=False)
    [fast] = drawloom(folder, *words, "run.name=fast")
    assert (slow.code, fast.code) == (0, 0), slow.text
    assert "skipped" not in slow.text
    learned = [series(folder / "runs" / name, *LEARNED) for name in ("slow", "fast")]
    assert learned[0] == learned[1] and len(learned[0]) == 10


@pytest.mark.soak
@pytest.mark.skipif(FAKETIME is None, reason="libfaketime is not installed (Debian: libfaketime)")
def test_a_clock_that_jumps_changes_nothing(folder: Path) -> None:
    """A run resumed with its clock six years back has the metrics of a run with a real clock."""
    assert drawloom(folder, *RUN, "run.name=plain")[0].code == 0
    _run_with_clock_offset("+3y x100", folder)
    run = folder / "runs" / "tiny"
    take_back(run, 8)
    text = _run_with_clock_offset("-3y", folder)
    assert "resuming after step 8" in text and "checkpoint saved" in text
    assert series(run, *LEARNED) == series(folder / "runs" / "plain", *LEARNED)


def _run_with_clock_offset(offset: str, folder: Path) -> str:
    """Run with a shifted wall clock, real monotonic clock and real file times; return its output."""
    env = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"], "LD_PRELOAD": str(FAKETIME)}
    env |= {"FAKETIME": offset, "DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1"}
    done = subprocess.run([sys.executable, "-m", "drawloom", *RUN], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run_as_nobody(folder: Path, arguments: Sequence[str]) -> Outcome:
    """
    Run as a user without further processes or threads, because root is exempt from the limit.

    Files are still opened as root: other users may not read the clone.
    """
    os.setgroups([])
    os.setresuid(NOBODY, NOBODY, 0)
    ctypes.CDLL(None).setfsuid(0)
    resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    return command(folder, arguments, None)


@pytest.mark.skipif(os.geteuid() != 0, reason="root is needed to become another user, who has no processes yet")
def test_a_process_limit_of_a_user_is_reported(folder: Path) -> None:
    """The error names `ulimit -u` and has no traceback."""
    folder.chmod(0o700)
    [outcome] = run_ranks(_run_as_nobody, 1, folder, RUN, variables=False)
    assert outcome.code == 1 and "no more threads can be started" in outcome.text, outcome
    assert "ulimit -u" in outcome.text and "Traceback" not in outcome.text
