"""Processes whose system calls are disturbed by strace, if it is installed."""

import os
import select
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

STRACE = shutil.which("strace")

CHANGING = (
    *("write", "pwrite64", "fsync", "fdatasync", "ftruncate", "openat"),
    *("rename", "renameat", "renameat2", "mkdir", "mkdirat", "unlink", "unlinkat", "rmdir"),
)
"""Calls that change files, and the one that opens them."""


def run_disturbed(work: Callable[[], object], call: str, number: int, outcome: str) -> tuple[int, bool]:
    """
    Do work in a fork of this process, and end its n-th call with this name by `outcome`: `signal=SIGKILL`,
    `error=ENOSPC`.

    Return its exit code, and whether it reached the call. Each thread counts its own calls.
    """
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.read(ready, 1)
            work()
            code = 0
        finally:
            os._exit(code)
    os.close(ready)
    log = Path(f"strace-{child}")
    inject = f"inject={call}:{outcome}:when={number}"
    options = ["-f", "-q", "-p", str(child), "-o", str(log), "-e", f"trace={call}", "-e", inject]
    with subprocess.Popen([str(STRACE), *options], stderr=subprocess.PIPE) as tracer:
        _wait_for_attachment(child)
        os.write(go, b"x")
        os.close(go)
        _, status = os.waitpid(child, 0)
        tracer.wait(10)
    text = log.read_text()
    log.unlink()
    return os.waitstatus_to_exitcode(status), "(INJECTED)" in text or "SIGKILL" in text


def _wait_for_attachment(child: int) -> None:
    """Wait until a tracer is attached to the process."""
    for _ in range(2000):
        if "TracerPid:\t0\n" not in Path(f"/proc/{child}/status").read_text():
            return
        select.select([], [], [], 0.002)
    os.kill(child, signal.SIGKILL)
    raise TimeoutError("strace does not attach to the process")
