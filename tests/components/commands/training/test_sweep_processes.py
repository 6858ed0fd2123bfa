"""Several processes at a time."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from drawloom.components.commands.training.sweep import open_pool_with_signal_forwarding

COUNT = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
mine = folder / sys.argv[2]
mine.touch()
time.sleep(0.3)
(folder / f"seen-{sys.argv[2]}").write_text(str(len([path for path in folder.iterdir() if path.name.isdigit()])))
mine.unlink()
sys.exit(int(sys.argv[2]) == 1)
"""


@pytest.mark.parametrize("size", [1, 2])
def test_at_most_so_many_run_at_a_time(tmp_path: Path, size: int) -> None:
    """Every command runs once, in order, and has its process's exit code."""
    started: list[int] = []
    commands = [[sys.executable, "-S", "-c", COUNT, str(tmp_path), str(number)] for number in range(4)]
    with open_pool_with_signal_forwarding(size) as pool:
        codes = dict(pool.run_and_yield_exit_codes(commands, started.append))
    assert started == [0, 1, 2, 3] and codes == {0: 0, 1: 1, 2: 0, 3: 0}
    seen = [int((tmp_path / f"seen-{number}").read_text()) for number in range(4)]
    assert max(seen) == size if size == 1 else max(seen) <= size


def test_a_signal_goes_to_all_processes_and_starts_nothing_more() -> None:
    """Running processes end by the signal they handle, and waiting ones are not started."""
    script = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)); time.sleep(30)"
    commands = [[sys.executable, "-S", "-c", script]] * 3
    began = time.monotonic()
    with open_pool_with_signal_forwarding(2) as pool:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        codes = dict(pool.run_and_yield_exit_codes(commands, lambda _: None))
    assert pool.received == signal.SIGTERM and set(codes) == {0, 1}
    assert set(codes.values()) <= {143, 1} and time.monotonic() - began < 20


def test_a_signal_during_a_start_goes_to_the_new_process() -> None:
    """A process that a signal kills has failed; a lost signal would let it end by itself, with code 0."""
    commands = [[sys.executable, "-S", "-c", "import time; time.sleep(10)"]] * 2
    with open_pool_with_signal_forwarding(2) as pool:
        codes = dict(pool.run_and_yield_exit_codes(commands, lambda _: signal.raise_signal(signal.SIGTERM)))
    assert codes == {0: 1} and pool.received == signal.SIGTERM
