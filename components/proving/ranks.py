"""Processes over gloo; they stay alive between runs, because starting one takes longer than a small run."""

import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import attrs

from drawloom import internal

PRELOADED = ["torch.distributed", "drawloom.components.proving.run"]
DIED = "the process died"
GRACE = 10.0  # seconds for other ranks to report, after one has failed


class RanksFailedError(Exception):
    """Failure of at least one rank; `failures` has tracebacks by rank, first failure first."""

    def __init__(self, failures: dict[int, str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
        self.failures = failures

    @property
    def last_line(self) -> str:
        """The first failure's last line."""
        return next(iter(self.failures.values())).strip().splitlines()[-1]


@attrs.define(eq=False)
class RankPool:
    """`size` processes for calling one function at a time in all; a single one has no launch."""

    size: int
    _processes: list[BaseProcess] = internal(factory=list)
    _pipes: list[Connection] = internal(factory=list)

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> list[Any]:
        """
        Call a module's plain function in all processes, in this one's folder, and return the results by rank.

        Raises RanksFailedError if a rank raises, dies, or is not done after `timeout` seconds; the next call starts
        new processes.
        """
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        if not self._processes:
            self._start()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its port is free, and held
        try:
            for rank, pipe in enumerate(self._pipes):
                variables = make_torchrun_variables(rank, self.size, store.port) if self.size > 1 else {}
                pipe.send_bytes(pickle.dumps((os.getcwd(), variables, function, arguments)))
            return self._collect(timeout)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        forkserver.set_forkserver_preload(PRELOADED)
        for _ in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, timeout: float) -> list[Any]:
        values: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while waiting:
            ready = wait(list(waiting), timeout)
            if not ready:
                failures |= dict.fromkeys(waiting.values(), f"not done after {timeout:g} s")
                break
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    is_done, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    is_done, value = False, DIED
                (values if is_done else failures)[rank] = value
            timeout = min(timeout, GRACE) if failures else timeout
        if failures:
            raise RanksFailedError(failures)
        return [values[rank] for rank in range(self.size)]


def make_torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return torchrun's variables for a rank, with a store at `port` in another process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _serve(pipe: Connection) -> None:
    """Call functions until the pipe is closed; what they print is dropped."""
    import torch

    os.setpgid(0, 0)
    torch.set_num_threads(1)
    with tempfile.TemporaryFile() as printed:
        for number in (1, 2):
            os.dup2(printed.fileno(), number)
        while True:
            try:
                message = pipe.recv_bytes()
            except EOFError:
                return
            try:
                folder, variables, function, arguments = pickle.loads(message)
                os.chdir(folder)
                os.environ |= variables
                answer = pickle.dumps((True, function(*arguments)))
            except BaseException as error:
                answer = pickle.dumps((False, "".join(traceback.format_exception(error))))
            pipe.send_bytes(answer)
