"""Runs a function of a test module in several real processes, like torchrun, and ends all of them."""

import faulthandler
import importlib.util
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Set
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from drawloom.components.distributed.launch_store import set_short_dns_timeout_variable
from drawloom.components.proving.ranks import make_torchrun_variables

set_short_dns_timeout_variable()  # the stores of tests are in this process

PRELOADED = ["torch.distributed", "numpy", "pytest", "support.preloaded"]
GRACE = 5.0  # seconds for the others to notice that a rank failed


class RanksFailedError(Exception):
    """
    Failure of at least one rank.

    `failures` has a traceback or a message by rank, first failure first; `values` has the results of the others.
    """

    def __init__(self, failures: dict[int, str], values: dict[int, Any]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in failures.items()))
        self.failures = failures
        self.values = values


@attrs.frozen
class Call:
    """A function of a test module, by its module's name and file, with its pickled arguments."""

    module: str
    file: str
    name: str
    arguments: bytes


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *arguments: Any,
    timeout: float = 60,
    variables: bool = True,
    lost: Set[int] = frozenset(),
    grace: float = GRACE,
) -> list[Any]:
    """
    Return the results of `function(*arguments)` in each of `world_size` new processes, by rank.

    The function is a plain function of a module; arguments and results are pickled. Each process has torchrun's
    variables, unless `variables` is false. Raise RanksFailedError if a rank raises, dies or is not done after `timeout`
    seconds; ranks in `lost` are not waited for, and count as failed. After a failure the others have `grace` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    start_fork_server()
    call = Call(
        function.__module__,
        str(sys.modules[function.__module__].__file__),
        function.__qualname__,
        pickle.dumps(arguments),
    )
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its port is free, and held
    processes: list[BaseProcess] = []
    pipes: list[Connection] = []
    try:
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            environment = make_torchrun_variables(rank, world_size, store.port) if variables else {}
            arguments = call, environment, sender, _duplicate_output_streams()
            process: BaseProcess = context.Process(target=_serve, args=arguments)
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        return _results(processes, pipes, timeout, lost, grace)
    finally:
        for process in processes:
            _end(process)
        for pipe in pipes:
            pipe.close()


class Crew:
    """
    One launch's processes; any of them can be started again, as by a cluster.

    `function(*arguments)` is a plain function of a module. Leaving the context kills all processes.
    """

    def __init__(self, function: Callable[..., Any], world_size: int, *arguments: Any) -> None:
        file = str(sys.modules[function.__module__].__file__)
        self._call = Call(function.__module__, file, function.__qualname__, pickle.dumps(arguments))
        self._context = multiprocessing.get_context("forkserver")
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.world_size = world_size
        self.processes: dict[int, BaseProcess] = {}
        self._groups: list[int] = []  # of all processes so far, each of which leads one
        self._pipes: dict[int, Connection] = {}

    def __enter__(self) -> "Crew":
        start_fork_server()
        for rank in range(self.world_size):
            self.start(rank)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        for group in self.groups_left():
            os.killpg(group, signal.SIGKILL)

    def groups_left(self) -> list[int]:
        """Return the process groups with a live process."""
        groups = set()
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError):
                state, _, group = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:3]
                groups |= {int(group)} if state != "Z" else set()
        return [group for group in self._groups if group in groups]

    def start(self, rank: int) -> None:
        """Start the process of a rank, after its earlier one has ended."""
        if rank in self.processes:
            self.processes.pop(rank).join()
            self._pipes.pop(rank).close()
        self._pipes[rank], sender = self._context.Pipe(duplex=False)
        environment = make_torchrun_variables(rank, self.world_size, self.store.port)
        arguments = self._call, environment, sender, _duplicate_output_streams()
        self.processes[rank] = self._context.Process(target=_serve, args=arguments)
        self.processes[rank].start()
        self._groups.append(self.processes[rank].pid or 0)
        sender.close()

    def result(self, rank: int) -> Any:
        """Return the value of a rank's function, or the text of its failure."""
        return _receive(self.processes[rank], self._pipes[rank])[1]


def is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not count."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def start_fork_server() -> None:
    """Start the fork server, unless it runs already."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        forkserver.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _results(
    processes: list[BaseProcess], pipes: list[Connection], timeout: float, lost: Set[int], grace: float
) -> list[Any]:
    values: dict[int, Any] = {}
    failures: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    end = time.monotonic() + timeout
    while not lost >= set(waiting.values()):
        ready = wait(list(waiting), max(0, end - time.monotonic()))
        if not ready:
            failures |= {rank: f"not done after {timeout} s" for rank in waiting.values() if not failures}
            break
        for pipe in ready:
            rank = waiting.pop(pipe)  # type: ignore[call-overload]
            done, value = _receive(processes[rank], pipe)  # type: ignore[arg-type]
            (values if done else failures)[rank] = value
        if failures:
            end = min(end, time.monotonic() + grace)
    failures |= {rank: "was not waited for" for rank in lost if rank not in {*values, *failures}}
    if failures:
        raise RanksFailedError(failures, values)
    return [values[rank] for rank in range(len(processes))]


def _receive(process: BaseProcess, pipe: Connection) -> tuple[bool, Any]:
    try:
        done, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join(GRACE)
        return False, f"died with exit code {process.exitcode}"
    return done, value


def _end(process: BaseProcess) -> None:
    """Kill a process and its descendants."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.kill()  # it may not lead its group yet
    process.join()
    process.close()


def _duplicate_output_streams() -> list[Connection]:
    """Return copies of this process's descriptors 1 and 2, as objects that can be sent to a forked process."""
    return [Connection(os.dup(number), readable=False) for number in (1, 2)]


def _serve(call: Call, environment: dict[str, str], pipe: Connection, streams: list[Connection]) -> None:
    os.setpgid(0, 0)
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)  # not the fork server's, which may be another test's
        stream.close()
    faulthandler.enable(2)  # to see in a test where a rank crashed
    os.environ |= environment
    torch.set_num_threads(1)
    try:
        module = _load(call.module, call.file)
        outcome = True, getattr(module, call.name)(*pickle.loads(call.arguments))
        answer = pickle.dumps(outcome)
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)
    pipe.close()


def _load(name: str, file: str) -> Any:
    """Load the module under its own name, from its file: pytest imports test modules without a search path."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def describe_rank(text: str) -> tuple[str, int]:
    """Return the rank's variable and the process id; raise or end on the word."""
    if text == "raise" and os.environ["RANK"] == "1":
        raise ValueError("wrong")
    if text == "die":
        os._exit(3)
    return os.environ["RANK"], os.getpid()
