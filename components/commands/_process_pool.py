"""Processes, several at a time, with this process's signals."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import attrs

from drawloom.components.distributed.cpu_threads import THREADS, count_threads_per_process
from drawloom.graph.cli.exit_codes import FAILED

FORWARDED = (signal.SIGINT, signal.SIGTERM)
POLL_SECONDS = 0.05


@attrs.define(eq=False)
class ProcessPool:
    """Runner of commands, at most `size` at a time. Several at a time share the cores and print nothing on stdout."""

    size: int
    received: int = 0
    _running: dict[int, "subprocess.Popen[bytes]"] = attrs.field(factory=dict)

    def run_and_yield_exit_codes(
        self, commands: Iterable[Sequence[str]], on_start: Callable[[int], None]
    ) -> Iterator[tuple[int, int]]:
        """
        Run all commands, and yield index and exit code when one ends. `on_start(index)` is called before a start.

        A command is taken from the iterable when it can start. After a signal nothing more is started; processes that
        the signal stops have its code.
        """
        waiting, is_exhausted = enumerate(commands), False
        while self._running or not (is_exhausted or self.received):
            while len(self._running) < self.size and not (is_exhausted or self.received):
                if (following := next(waiting, None)) is None:
                    is_exhausted = True
                else:
                    index, command = following
                    on_start(index)
                    self._running[index] = self._start_process(command)
            for index, code in [(index, process.poll()) for index, process in self._running.items()]:
                if code is not None:
                    del self._running[index]
                    yield index, FAILED if code < 0 else code
            time.sleep(POLL_SECONDS if self._running else 0)

    def _start_process(self, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start a command; with several at a time, limit its threads and discard its stdout."""
        if self.size == 1:
            return subprocess.Popen(command)
        environment = {THREADS: str(count_threads_per_process(self.size)), **os.environ}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    def forward_signal(self, number: int, _frame: FrameType | None) -> None:
        """Forward a signal; the processes save a checkpoint, and end."""
        self.received = number
        for process in self._running.values():
            if process.poll() is None:
                process.send_signal(number)


@contextmanager
def open_pool_with_signal_forwarding(size: int) -> Iterator[ProcessPool]:
    """Yield a pool. Until the context ends, SIGINT and SIGTERM go to its processes instead of ending this one."""
    pool = ProcessPool(size)
    before = {number: signal.signal(number, pool.forward_signal) for number in FORWARDED}
    try:
        yield pool
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
