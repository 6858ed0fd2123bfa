"""The first seconds of a process, while torch is imported: signals, and the death of the parent process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from support.processes import is_alive

SOURCE = str(Path(__file__).parents[2] / "src")
RUN = [sys.executable, "-m", "drawloom", "run", "tiny.toml", "trainer.steps=1000000"]
ENVIRONMENT = {"PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
RANK_0_OF_2 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
PARENT = "import subprocess, sys; print(subprocess.Popen(sys.argv[1:]).pid, flush=True); sys.stdin.read()"


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.002)
    return condition()


@contextmanager
def _start(folder: Path, command: Sequence[str], ignored: Sequence[int] = (), **options: Any) -> Iterator[Any]:
    """Start a process with these signals ignored, and kill it at the end."""

    def set_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):  # background jobs of a shell ignore SIGINT
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    environment = {**ENVIRONMENT, **options.pop("environment", {})}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, cwd=folder, env=environment, preexec_fn=set_signals, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.kill()


def _has_loaded(pid: int, library: str) -> bool:
    """Return whether a process has mapped a library."""
    try:
        return library in Path(f"/proc/{pid}/maps").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("library", "number", "code"), [("libtorch_cpu", signal.SIGTERM, 143), ("_multiarray_umath", signal.SIGINT, 130)]
)
def test_a_signal_during_the_import_of_torch_exits_cleanly(folder: Path, library: str, number: int, code: int) -> None:
    """The exit code is the usual one, and Ctrl-C prints one line instead of a traceback."""
    with _start(folder, RUN) as process:
        assert _wait_until(lambda: _has_loaded(process.pid, library), 60)
        process.send_signal(number)
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == code
    assert printed == (b"interrupted\n" if number == signal.SIGINT else b"") and not (folder / "runs").exists()


def test_an_ignored_signal_stays_ignored(folder: Path) -> None:
    """Signals that `nohup` or a shell ignores are ignored during the import of torch, too."""
    command = [sys.executable, "-m", "drawloom", "check", "tiny.toml"]
    with _start(folder, command, ignored=[signal.SIGTERM]) as process:
        assert _wait_until(lambda: _has_loaded(process.pid, "libtorch_cpu"), 60)
        process.terminate()
        printed, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and b"no problems" in printed


@pytest.mark.parametrize("library", ["libpython", "libtorch_cpu"])
def test_a_worker_ends_when_torchrun_is_killed_at_once(folder: Path, library: str) -> None:
    """A worker ends within seconds of torchrun: it does not wait for other ranks or keep its port."""
    environment = RANK_0_OF_2 | {"MASTER_PORT": "1"}
    command = [sys.executable, "-c", PARENT, *RUN, "processes.timeout=60"]
    with _start(folder, command, environment=environment) as parent:
        pid = int(parent.stdout.readline())
        assert _wait_until(lambda: _handles_sigterm(pid), 60)
        assert _wait_until(lambda: library == "libpython" or _has_loaded(pid, library), 60)
        parent.kill()
        parent.wait()
    gone = _wait_until(lambda: not is_alive(pid), 5)
    if not gone:
        os.kill(pid, signal.SIGKILL)
    assert gone


def _handles_sigterm(pid: int) -> bool:
    """Return whether a process handles SIGTERM, which drawloom does first."""
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def _run_in_shell(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    environment = {**ENVIRONMENT, "DRAWLOOM": f"{sys.executable} -m drawloom"}
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_closed_streams_get_no_file(folder: Path) -> None:
    """A file that a run opens never gets descriptor 1 or 2, where messages would overwrite it."""
    numbers = "import os, sys, drawloom.__main__ as m; m._reopen_closed_streams(); "
    numbers += "print('lost'); print('lost', file=sys.stderr); sys.exit(os.open('file', os.O_CREAT | os.O_RDWR))"
    assert _run_in_shell(folder, f'{sys.executable} -c "{numbers}" <&- >&- 2>&-').returncode == 3
    assert (folder / "file").read_bytes() == b""
    assert _run_in_shell(folder, "$DRAWLOOM check tiny.toml >&- 2>&-").returncode == 0


def test_an_ascii_terminal_gets_escapes(folder: Path) -> None:
    """Characters that the terminal's encoding lacks are printed as escapes and do not end the command."""
    drawn = _run_in_shell(folder, "PYTHONIOENCODING=ascii $DRAWLOOM draw tiny.toml")
    assert (drawn.returncode, drawn.stderr) == (0, "")
    assert "\\u251c" in drawn.stdout


LEFT = """
import threading, time
from drawloom import __main__

__main__.THREAD_SECONDS = {seconds}
threading.Thread(target=time.sleep, args=({thread},), name="upload").start()
__main__._exit_despite_threads(3)
print("all threads have ended")
"""


@pytest.mark.parametrize(("seconds", "thread", "code"), [(0.2, 600, 3), (600, 0.2, 0)])
def test_a_thread_that_is_left_over_is_named_and_not_waited_for(seconds: float, thread: float, code: int) -> None:
    """The exit code is the command's, and only threads that end soon are waited for."""
    program = LEFT.format(seconds=seconds, thread=thread)
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and ("all threads have ended" in done.stdout) == (code == 0)
    assert ("a component left threads" in done.stderr and "upload" in done.stderr) == (code == 3)
