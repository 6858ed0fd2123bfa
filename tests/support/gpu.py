"""Runs on GPUs, by the commands of a user, each in its own processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import attrs

ROOT = Path(__file__).parents[2]
LIMIT = 300.0  # seconds; the first run on a machine compiles


@attrs.frozen
class EndedCommand:
    """A command's exit code (of its first process), output (of all processes) and duration in seconds."""

    code: int
    text: str
    seconds: float


def drawloom_run(
    folder: Path, *words: str, processes: int = 1, command: str = "run", kill_after: int | None = None
) -> EndedCommand:
    """
    Run `drawloom COMMAND WORDS` in a folder, by torchrun if in several processes.

    With `kill_after` all its processes are killed (SIGKILL) once its run, named by `run.name=NAME`, has tracked this
    many steps. Raises AssertionError if it ends before, or does not end in time.
    """
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    arguments = [sys.executable, "-m", *(torchrun if processes > 1 else []), "drawloom", command, *words]
    paths = [str(ROOT / "src"), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    with TemporaryFile(dir=folder) as printed:
        with subprocess.Popen(
            arguments, cwd=folder, env=environment, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True
        ) as process:
            try:
                if kill_after is not None:
                    _await_step(folder / "runs" / _name(words), kill_after, process)
                    _kill(process.pid)
                code = process.wait(LIMIT)
            finally:
                _kill(process.pid)
        printed.seek(0)
        return EndedCommand(code, printed.read().decode("utf-8", "replace"), time.monotonic() - began)


def _name(words: tuple[str, ...]) -> str:
    return next((word.removeprefix("run.name=") for word in words if word.startswith("run.name=")), "tiny")


def _await_step(run: Path, step: int, process: "subprocess.Popen[bytes]") -> None:
    written, end = run / "metrics.jsonl", time.monotonic() + LIMIT
    while not (written.exists() and written.read_bytes().count(b"\n") >= step):
        assert process.poll() is None, f"the run ended with exit code {process.returncode} before step {step}"
        assert time.monotonic() < end, f"the run has not come to step {step} in {LIMIT:g} s"
        time.sleep(0.001)


def _kill(process: int) -> None:
    """Kill a process and its descendants in any session: each of torchrun's workers has its own."""
    for pid in [*_descendants(process), process]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(process: int) -> Iterator[int]:
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                yield from (*_descendants(child), child)
