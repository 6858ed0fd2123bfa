"""Reward for programs that pass their tests."""

import os
import time
from pathlib import Path

import pytest

from drawloom.components.rewards.code import Code
from support.rewards import answer

GOOD = "def double(x):\n    return 2 * x\n"
TESTS = "assert double(2) == 4\nassert double(-1) == -2"


def test_programs_pass_only_if_all_tests_have_run() -> None:
    """Right programs pass; wrong ones, and those that exit, print or raise before the tests, fail."""
    programs = {
        GOOD: 1,
        f"Sure:\n```python\nwrong\n```\nor\n```py\n{GOOD}```\nDone.": 1,
        "def double(x):\n    return x + 2\n": 0,
        f"{GOOD}import os\nos._exit(0)": 0,
        f"{GOOD}raise SystemExit(0)": 0,
        "print('passed')": 0,
        "not python": 0,
        "": 0,
    }
    assert Code(seconds=20.0).scores([answer(text, tests=TESTS) for text in programs]) == [*programs.values()]


def test_programs_are_stopped_at_their_limits(tmp_path: Path) -> None:
    """
    A loop, a sleeper with a child process, much memory, a large file and much output score 0; no process survives.
    """
    marker = tmp_path / "child"
    child = f"import os, time\nif os.fork() == 0:\n    open({str(marker)!r}, 'w').write(str(os.getpid()))\n"
    programs = [
        "while True: pass",
        f"{child}time.sleep(60)",
        "data = bytearray(10**10)",
        "open('large', 'wb').write(bytes(2**22))",
        "import sys\nwhile True: sys.stdout.write('x' * 10**6)",
    ]
    began = time.monotonic()
    assert Code(seconds=2.0, parallel=5).scores([answer(text, tests="pass") for text in programs]) == [0.0] * 5
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):
        for _ in range(100):
            os.kill(int(marker.read_text()), 0)
            time.sleep(0.1)
