"""The process that ends this one when its threads can't; tests start Pythons without torch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SOURCE = str(Path(__file__).parents[3] / "src")

START = """
import os, re, signal, sys, time
from drawloom.components.distributed.guard import guard
guard.fork_guard_process()
"""

HOLD = """
def hold():
    print("holding", flush=True)
    re.match("(a+)+$", "a" * 60 + "b")  # which holds the interpreter's lock for years
"""


LIFE = "signal.alarm(90)\n"  # no program outlives a test that fails


def _start(program: str) -> "subprocess.Popen[str]":
    command, environment = [sys.executable, "-c", START + LIFE + program], {"PYTHONPATH": SOURCE}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)  # type: ignore[call-overload,no-any-return]


def test_a_process_whose_lock_is_held_is_named_and_killed() -> None:
    """The message and the lock holder's stack are printed, though no Python thread can run."""
    with _start(HOLD + "guard.set_time_limit(0.5, 'rank 3 hangs: open() of [corpus]')\nhold()") as process:
        out, printed = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and out == "holding\n"
    assert printed.startswith("rank 3 hangs: open() of [corpus]\n") and " in hold\n" in printed


def test_a_limit_that_is_lifted_or_renewed_kills_nobody() -> None:
    """Neither the old limit nor its message counts."""
    limits = ("0.5, 'old'", "600.0, 'new'", "None")
    program = "\n".join(f"guard.set_time_limit({limit})" for limit in limits) + "\ntime.sleep(2)"
    with _start(program) as process:
        assert process.communicate(timeout=60) == ("", "") and process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_guard_ends_with_its_process(number: int) -> None:
    """After any end of the process, its output ends at once, and no process is left."""
    program = "signal.signal(signal.SIGTERM, lambda *_: os._exit(9))\nprint(1, flush=True)\ntime.sleep(600)"
    with _start(program) as process:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(number)
        process.communicate(timeout=60)
    end = time.monotonic() + 30
    while Path(f"/proc/{child}").exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not Path(f"/proc/{child}").exists()


def test_a_signal_to_the_whole_group_does_not_end_the_guard() -> None:
    """Ctrl-C and a cluster's SIGTERM reach both processes; the run may take minutes to stop, and hang meanwhile."""
    program = "[signal.signal(number, signal.SIG_IGN) for number in (2, 15)]\n" + HOLD
    program += "os.kill(int(open(f'/proc/{os.getpid()}/task/{os.getpid()}/children').read()), 15)\n"
    with _start(program + "guard.set_time_limit(0.5, 'hangs')\nhold()") as process:
        _, printed = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and printed.startswith("hangs\n")


def test_a_stopped_process_does_not_hang() -> None:
    """Ctrl-Z stops the clock: the process has its time when it continues."""
    with _start("guard.set_time_limit(1.5, 'hangs')\nprint(1, flush=True)\nsys.stdin.readline()") as process:
        assert process.stdout is not None and process.stdout.readline() == "1\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(3)  # twice the limit
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate("\n", timeout=60) == ("", "") and process.returncode == 0
