"""Reward for programs that pass their tests, in processes with limited time and memory."""

import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from drawloom import above, between, component, setting
from drawloom.components.rewards import code_process
from drawloom.components.rewards.expected import ExpectedValueReward
from drawloom.ports import Answer

FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)


@component
class Code(ExpectedValueReward):
    """
    1 for a Python program that passes its tests, else 0.

    The program is the completion's last fenced block, or all of its text. The example's value, by default `tests`, is
    Python code that raises an error if the program is wrong, such as `assert f(2) == 4`; it runs after the program, in
    its namespace. Each program has a process and an empty folder of its own, and limits of time, memory and files; at
    its end all its processes are killed. That contains mistakes, not attacks: a program can read the user's files, and
    reach the network. Run untrusted models inside a container.
    """

    key: str = setting("key of the example's tests", default="tests")
    seconds: float = setting("limit of the time for a program and its tests", default=5.0, check=above(0))
    memory: float = setting("limit of a program's address space, in GB", default=0.5, check=above(0))
    parallel: int = setting("programs that run at the same time", default=2, check=between(1, 1025), impact="safe")

    def scores(self, answers: Sequence[Answer]) -> list[float]:
        programs, tests = [extract_program(answer.text) for answer in answers], map(self.read_expected_text, answers)
        with ThreadPoolExecutor(self.parallel) as threads:
            return [float(passed) for passed in threads.map(self._passes_tests, programs, [*tests])]

    def _passes_tests(self, program: str, tests: str) -> bool:
        """Return whether a program's process reaches the end of the tests, where it writes the nonce."""
        nonce = secrets.token_hex(16)
        request: dict[str, object] = {"program": program, "tests": tests, "nonce": nonce}
        request |= {"seconds": math.ceil(self.seconds), "bytes": round(self.memory * 1e9)}
        reader, writer = os.pipe()
        os.set_blocking(reader, False)  # a process that escaped from its session may still hold the other end
        try:
            with tempfile.TemporaryDirectory() as folder:
                self._run_process(request, folder, writer)
            return os.read(reader, len(nonce) + 1) == nonce.encode()
        except BlockingIOError:  # nothing was written
            return False
        finally:
            os.close(reader)
            os.close(writer)

    def _run_process(self, request: dict[str, object], working_folder: str, nonce_descriptor: int) -> None:
        """Run a request in a new session, and kill all its processes at the end or at the time limit."""
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", code_process.__file__, str(nonce_descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=working_folder,
            env={"PATH": os.defpath, "HOME": working_folder},
            pass_fds=[nonce_descriptor],
            start_new_session=True,
        )
        try:
            with suppress(subprocess.TimeoutExpired):  # as wrong as a program that fails
                process.communicate(json.dumps(request).encode(), timeout=self.seconds)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # the session's other processes outlive its first one
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def extract_program(text: str) -> str:
    """Return the last fenced block of a text, or the whole text without one."""
    blocks = FENCE.findall(text)
    return str(blocks[-1]) if blocks else text
