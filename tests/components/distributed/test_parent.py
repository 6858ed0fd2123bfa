"""Workers end when their parent process dies."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.processes import is_alive

ORPHAN = """
import os, sys, time
from drawloom.components.distributed.device import ComputeDevice
from drawloom.components.distributed.processes import TorchProcesses
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "x"}
os.environ |= {"MASTER_PORT": "1"} if len(sys.argv) > 1 else {}
if len(sys.argv) == 1:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
TorchProcesses(device=ComputeDevice(kind="cpu")).open()
print(os.getpid(), flush=True)
time.sleep(60)
"""

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def _gone(pid: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not is_alive(pid):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("started_by_torchrun", [True, False])
def test_an_orphan_of_torchrun_ends_itself(started_by_torchrun: bool) -> None:
    """A worker ends within a second after torchrun is killed; a process started by a shell does not."""
    source = str(Path(__file__).parents[3] / "src")
    command = [sys.executable, "-c", PARENT, ORPHAN, *(["torchrun"] if started_by_torchrun else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={"PYTHONPATH": source}, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        gone = _gone(pid, 1.0)
        if not gone:
            os.kill(pid, signal.SIGKILL)
    assert gone == started_by_torchrun
