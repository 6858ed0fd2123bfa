"""
run a command in several processes on one or more machines

torchrun's agent starts the processes. Unlike torchrun, this command prints nothing if a process has already reported
its error, exits with that process's code, and waits until a stopped run has saved its checkpoint. If the run survives
losses (`processes.on_failure`), the other processes continue, and `--max-restarts` is the number of lost processes that
are started again, one by one. Hot spares (`--spares`) wait beside them, and take a lost process's place at once.
"""

import copy
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar
from uuid import uuid4

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher import api
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from drawloom import at_least
from drawloom.components.distributed.cpu_threads import THREADS, count_threads_per_process
from drawloom.components.distributed.generation import Generation
from drawloom.components.distributed.launch_store import (
    call_store_with_timeout,
    connect_to_launch_store,
    set_short_dns_timeout_variable,
)
from drawloom.components.distributed.membership import CURRENT, Spares, read_and_count_heartbeats
from drawloom.components.distributed.torchrun import CONTINUES, ROUND, SPARES
from drawloom.graph.cli.command import (
    INVALID,
    OK,
    STOPPED,
    Command,
    Count,
    Project,
    Result,
    UserError,
    argument,
    command,
    option,
    output,
    output_class,
    print_escaped_text,
)

# These loggers print several lines per failure and signal, and report a rendezvous that another machine has ended.
AGENT_LOGS = ("agent.server.api", "multiprocessing.api", "rendezvous.dynamic_rendezvous")

SPARES_INTERVAL = 0.5  # seconds between two questions whether the run has begun, which spares can join

STORE_SECONDS = 3.0  # for the launch's store to answer

HEARTBEAT_SECONDS = 5.0  # for a heartbeat of another machine, which may be reopening its recipe

SHUTDOWN_SECONDS = 30 * 24 * 3600
"""Time for processes to end after a signal, long because `stop.grace` is the limit; torch 2.11's default is 30 s."""


@output_class
class LaunchResult(Result):
    """The end of a launched command. Its own output, also that of its `--format json`, is on stderr."""

    command: Sequence[str] = output("launched command")
    code: int = output("exit code of the first failed process, or 0")

    @property
    def exit_code(self) -> int:
        """The first failed process's exit code, or 0."""
        return self.code


class Agent(LocalElasticAgent):
    """Agent of torchrun that replaces lost workers one by one if the workers have declared that they survive losses."""

    _surviving = ""  # the attempt whose workers survive losses
    _replaced = 0  # lost workers that were started again
    _spares_missing = 0  # spares still to be started in this attempt
    _next_query = 0.0  # time of the next question whether spares may start
    _continues_until = 0.0  # time until which a heartbeat of another machine counts

    def __init__(self, spares: int, **options: Any) -> None:
        super().__init__(**options)
        self._spares = spares

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers, and record the spares to start as soon as there is a run to join (`_monitor_workers`)."""
        self._spares_missing = self._spares
        os.environ[ROUND] = _get_rendezvous_round(worker_group)
        pids: dict[int, Any] = super()._start_workers(worker_group)
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the workers' state; a loss that they survive counts as healthy while one of them runs."""
        workers: Any = self._pcontext  # torch's SubprocessContext, because the entry point is a command
        if self._spares_missing and time.monotonic() > self._next_query:
            self._next_query = time.monotonic() + SPARES_INTERVAL
            if self._workers_survive_loss(worker_group):
                self._start_spares(worker_group)
        codes = [handler.proc.poll() for handler in workers.subprocess_handlers.values()]
        if INVALID in codes:
            self._remaining_restarts = 0  # another start would find the same fault in the recipe
        if any(codes) and self._workers_survive_loss(worker_group):
            if None in codes or (OK not in codes and self._run_continues_elsewhere(worker_group)):
                self._restart_lost_workers(worker_group)
                return RunResult(state=WorkerState.HEALTHY)
            # completed by another worker, here or on another machine; killed workers alone report nothing themselves
            if OK in codes or (max(codes) < 0 and self._find_exit_code(worker_group) == OK):
                values = {worker.global_rank: None for worker in worker_group.workers}
                return RunResult(state=WorkerState.SUCCEEDED, return_values=values)
        outcome: RunResult = super()._monitor_workers(worker_group)
        return outcome

    def _shutdown(self, *arguments: Any, **options: Any) -> None:
        """End the workers. Stopped ones (SIGSTOP) are resumed before, because they would not receive SIGTERM."""
        workers: Any = self._pcontext
        for handler in workers.subprocess_handlers.values() if workers else ():
            if handler.proc.poll() is None:
                os.killpg(handler.proc.pid, signal.SIGCONT)
        super()._shutdown(*arguments, **options)

    def _start_spares(self, worker_group: WorkerGroup) -> None:
        """Start the spares: more workers for torch's agent, with the variables of the first ones."""
        workers: Any = self._pcontext
        count = worker_group.spec.local_world_size
        for slot in range(count, count + self._spares_missing):
            model = slot % count
            workers.envs[slot], workers.error_files[slot] = workers.envs[model], workers.error_files[model]
            workers.subprocess_handlers[slot] = copy.copy(workers.subprocess_handlers[model])
            workers._running_local_ranks.add(slot)
            worker_group.workers.append(Worker(slot, worker_group.workers[model].global_rank))
            self._start_process(worker_group, slot)
        self._spares_missing = 0

    def _restart_lost_workers(self, worker_group: WorkerGroup) -> None:
        """Start lost workers again, as often as restarts are allowed. They wait as spares, or join at a step's end."""
        workers: Any = self._pcontext
        for slot, handler in workers.subprocess_handlers.items():
            allowed = self._replaced < worker_group.spec.max_restarts
            if handler.proc.poll() and allowed and not self._has_failed_or_lost_store(worker_group):
                self._replaced += 1
                self._start_process(worker_group, slot)

    def _start_process(self, worker_group: WorkerGroup, slot: int) -> None:
        """Start the process of a worker, which joins the run."""
        workers: Any = self._pcontext
        handler = workers.subprocess_handlers[slot]
        environment = {**os.environ, **workers.envs[slot]}
        handler.proc = subprocess.Popen(handler.proc.args, env=environment, start_new_session=True)
        worker_group.workers[slot].id = handler.proc.pid

    def _has_failed_or_lost_store(self, worker_group: WorkerGroup) -> bool:
        """Return whether the run ends because of a failure, or its store does not answer."""

        def has_recorded_failure() -> bool:
            generation = Generation.from_json(
                self._connect_to_store(worker_group, self._surviving).get(CURRENT).decode()
            )
            return bool(self._connect_to_store(worker_group, generation.name).check(["failure"]))

        return call_store_with_timeout(STORE_SECONDS, has_recorded_failure) is not False

    def _run_continues_elsewhere(self, worker_group: WorkerGroup) -> bool:
        """Return whether ranks on other machines send heartbeats, so that workers of this one can join them again."""
        if time.monotonic() < self._continues_until:
            return True
        if worker_group.group_world_size == 1 or self._has_failed_or_lost_store(worker_group):
            return False

        def wait_for_heartbeat() -> bool:
            store = self._connect_to_store(worker_group, self._surviving)
            before, end = read_and_count_heartbeats(store), time.monotonic() + HEARTBEAT_SECONDS
            while read_and_count_heartbeats(store) == before:
                if time.monotonic() > end:
                    return False
                time.sleep(0.1)
            return True

        continues = call_store_with_timeout(STORE_SECONDS + HEARTBEAT_SECONDS, wait_for_heartbeat) is True
        self._continues_until = time.monotonic() + HEARTBEAT_SECONDS * continues
        return continues

    def _find_exit_code(self, worker_group: WorkerGroup) -> int | None:
        """Return the code with which the run has ended, also on other machines; None if it has not, or is unknown."""

        def read_exit_code() -> int | None:
            store = self._connect_to_store(worker_group, self._surviving)
            run = Generation.from_json(store.get(CURRENT)).run
            return Spares(PrefixStore(run, store)).find_exit_code()

        return call_store_with_timeout(STORE_SECONDS, read_exit_code)

    def _connect_to_store(self, worker_group: WorkerGroup, name: str) -> Any:
        group: Any = worker_group  # torch declares the address as None
        return connect_to_launch_store(group.master_addr, group.master_port, name, STORE_SECONDS)

    def _workers_survive_loss(self, worker_group: WorkerGroup) -> bool:
        """Return whether the workers have declared, with CONTINUES in the store, that they survive a loss."""
        attempt = f"{worker_group.spec.rdzv_handler.get_run_id()}{_get_rendezvous_round(worker_group)}"

        def query_store() -> bool:
            return bool(self._connect_to_store(worker_group, attempt).check([CONTINUES]))

        if self._surviving != attempt and call_store_with_timeout(STORE_SECONDS, query_store):
            self._surviving = attempt
        return self._surviving == attempt


def _get_rendezvous_round(worker_group: WorkerGroup) -> str:
    """Return the number of the machines' current rendezvous, equal on all of them."""
    handler: Any = worker_group.spec.rdzv_handler  # torch's DynamicRendezvousHandler
    return str(handler._state_holder.state.round)


@command
class LaunchCommand(Command):
    """Another command, launched in all processes."""

    accepts_words: ClassVar[bool] = True

    nproc_per_node: Count = option("processes per machine")
    nnodes: Count = option("machines", default=1)
    rdzv_endpoint: str = option("address for all machines to meet, on one of them", default="", metavar="HOST:PORT")
    max_restarts: int = option(
        "restarts after failures, of all processes, or of lost ones if the run survives losses",
        default=0,
        check=at_least(0),
    )
    spares: int = option(
        "hot spares per machine: processes waiting to replace lost ones (processes.on_failure)",
        default=0,
        check=at_least(0),
    )
    arguments: Sequence[str] = argument(
        "the command, such as: run first_run", default=(), metavar="COMMAND ...", nargs="..."
    )

    def run(self, project: Project) -> LaunchResult:
        if not self.arguments:
            raise UserError("there is no command to launch; write it last, such as: run first_run", 2)
        if self.nnodes > 1 and not self.rdzv_endpoint:
            raise UserError("--nnodes: several machines need --rdzv-endpoint HOST:PORT, the same on each of them", 2)
        if self.spares and self.nnodes * self.nproc_per_node == 1:
            raise UserError(
                "--spares: a run needs two processes or more to survive a loss; write --nproc-per-node 2", 2
            )
        set_short_dns_timeout_variable()
        os.environ.setdefault(THREADS, str(count_threads_per_process(self.nproc_per_node)))
        os.environ[SPARES] = str(self.spares)
        os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
        for name in AGENT_LOGS:
            logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
        command = [*self.arguments, *self.words, *(f"--import={path}" for path in self.imports)]
        launcher: Any = api
        launcher.LocalElasticAgent = partial(Agent, self.spares)  # elastic_launch has no argument for the agent's class
        package = project.registry.package.partition(".")[0]
        try:
            config = LaunchConfig(
                min_nodes=self.nnodes,
                max_nodes=self.nnodes,
                nproc_per_node=self.nproc_per_node,
                run_id="drawloom" if self.nnodes > 1 else str(uuid4()),
                rdzv_backend="c10d",
                rdzv_endpoint=self.rdzv_endpoint or "localhost:0",
                max_restarts=self.max_restarts,
            )
            elastic_launch(config, sys.executable)("-u", "-m", package, *command)
        except ChildFailedError as error:
            return LaunchResult(command, print_failure(error))
        except SignalException as stopped:
            return LaunchResult(command, STOPPED + stopped.sigval)
        return LaunchResult(command, OK)


STOPPED_CODES = {STOPPED + signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")}
"""Exit codes after stop signals; processes log these themselves."""


def print_failure(error: ChildFailedError) -> int:
    """Return the first failed process's exit code, and print the failure unless a process has reported it."""
    rank, first = error.get_first_failure()
    failures = error.failures.values()
    if not any(isinstance(failure.message, dict) or failure.exitcode in STOPPED_CODES for failure in failures):
        signalled = f"was ended by {signal.Signals(-first.exitcode).name}" if first.exitcode < 0 else ""
        print_escaped_text(
            f"rank {rank} (process {first.pid}) {signalled or f'ended with code {first.exitcode}'}", "stderr"
        )
    return STOPPED - first.exitcode if first.exitcode < 0 else first.exitcode
