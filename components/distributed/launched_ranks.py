"""The ranks of a launch, seen from one of them: torch's process groups, the monitor, and generations after losses."""

import gc
import logging
import os
import secrets
import sys
import time
from functools import partial
from types import TracebackType
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from drawloom import Every, UserError, internal
from drawloom.components.distributed.connections import Connections
from drawloom.components.distributed.generation import Generation, ReplicaShape, RunProcess
from drawloom.components.distributed.group_factory import GroupFactory
from drawloom.components.distributed.launch_store import (
    call_store_with_timeout,
    connect_to_launch_store,
    set_short_dns_timeout_variable,
)
from drawloom.components.distributed.membership import (
    CURRENT,
    RECOVERY_MARGIN,
    RUNS,
    Membership,
    Spares,
    agree_on_next_generation,
    start_membership,
    wait_to_join_running_generation,
)
from drawloom.components.distributed.parent import start_exit_with_parent_thread
from drawloom.components.distributed.process_group import convert_if_collective_error
from drawloom.components.distributed.rank_monitor import STORE_LOST, STORE_TIMEOUT, RankMonitor
from drawloom.components.distributed.torchrun import CONTINUES, Launch, read_launch
from drawloom.graph.cli.terminal import print_escaped_text
from drawloom.graph.garbage import free_closed_graphs
from drawloom.graph.problems import ReopenError, ReportedError
from drawloom.ports import PRINTED, Device, ReplicaLimit

log = logging.getLogger("drawloom.distributed")

NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@attrs.define(eq=False)
class LaunchedRanks:
    """
    The ranks in `launch`, for `TorchProcesses` with the same settings; `heartbeat_timeout` is None unless losses are
    survived.

    `next` is this process's membership in the next generation, or "spare" for a process without one; None unless the
    graph is reopened.
    """

    launch: Launch
    device: Device
    limits: Every[ReplicaLimit]
    timeout: float
    heartbeat_timeout: float | None
    next: Membership | Literal["spare"] | None = None

    groups: GroupFactory = attrs.field(
        init=False, default=attrs.Factory(lambda self: GroupFactory(self.device), takes_self=True)
    )
    monitor: RankMonitor = internal(factory=RankMonitor)
    generation: Generation | None = internal(None)
    _control: Any = internal(None)  # connection to the launch's store
    _spares: Spares | None = internal(None)
    _exit_code: int = internal(0)

    @property
    def survives_losses(self) -> bool:
        """Whether the run continues after the loss of a rank."""
        return self.heartbeat_timeout is not None

    def open(self) -> None:
        """Join the process group, if there are other processes. Raises UserError if they do not join in time."""
        if self.survives_losses:
            self._check_gpus_survive_losses()
            set_short_dns_timeout_variable()
            os.environ[NCCL_ERROR_HANDLING] = "0"  # by default, NCCL's watchdog ends a process that loses a peer
        elif self.launch.spares:
            raise UserError(
                f"the launcher has {self.launch.spares} spare(s) for lost processes (--spares), and on_failure = "
                "'stop' ends the run with a loss; write on_failure = 'continue'",
                exit_code=2,
            )
        if self.launch.address:
            start_exit_with_parent_thread(os.getppid())
        membership, self.next = self.next, None
        if self.heartbeat_timeout is not None and not isinstance(membership, Membership):
            membership = wait_to_join_running_generation(
                self.launch,
                self.timeout,
                self.heartbeat_timeout,
                self._list_spare_gpus(),
                is_member=membership == "spare",
            )
        if isinstance(membership, Membership):
            self._join_generation_groups(membership)
        else:
            if RUNS:
                free_closed_graphs()  # with the groups of earlier runs, whose threads poll their connections
            self.device.make_current()
            self.groups = self._create_group_factory(Connections(self.launch.port))
            if not self.launch.is_single_process:
                self.groups.join(self._connect_store_with_own_keys())
            self.monitor = self.groups.monitor = self._start_monitor_and_connect_stores()

    def close(self) -> None:
        """Destroy the process group and stop the monitor."""
        if self.next is None:
            self.monitor.announce_exit()
            if self.survives_losses:
                gc.unfreeze()  # frozen in `open` for recoveries; kept for good, groups would outlive their run
            if self._spares is not None and self.launch.rank == 0:
                call_store_with_timeout(STORE_TIMEOUT, partial(self._spares.announce_run_end, self._exit_code))
        self.groups.close()
        # stopped last: after a failure, the monitor kills a process that hangs in one of the calls above
        self.monitor.close()
        self.monitor = RankMonitor()

    def set_replica_shape(self, stages: int, shards: int, shard_size: int, expert: int) -> None:
        """Set the shape of a replica, in the first generation (`Processes.set_replica_shape`)."""
        if (before := self.generation) is None or before.shape:
            return
        limits = self.limits.values()
        shape = ReplicaShape.with_fitting_counts(
            self.launch.world_size,
            (stages, shards, shard_size, expert),
            lambda count: all(limit.supports_replica_count(count) for limit in limits),
        )
        self.generation = attrs.evolve(before, shape=shape)
        if self.survives_losses:  # spares need the shape if all members are lost
            self._control.compare_set(CURRENT, before.to_json(), self.generation.to_json())

    def can_grow_with_spares(self, state_bytes: int) -> bool:
        """Return whether enough processes wait to join (`Processes.can_grow_with_spares`)."""
        if self.generation is None or self._spares is None or self.launch.rank > 0:
            return False
        self._spares.announce_preparation(sys.modules.keys(), state_bytes)
        following = self.generation.choose_next_generation(set(), self._spares.find_waiting_spares().values())
        return len(following.members) > self.launch.world_size

    def report_failure(self, error: Exception) -> BaseException | None:
        """
        Report this rank's failure, which ends all ranks, and return a ReportedError; None if there are no other ranks.

        If the run survives a loss, or lets spares join, return a ReopenError instead.
        """
        if self.monitor.store is None:
            return None
        error = convert_if_collective_error(error, self.monitor)  # gives the monitor time to notice a killed rank
        if (isinstance(error, ReopenError) or self._await_rank_loss()) and (
            outcome := self._agree_on_next_generation()
        ):
            return outcome
        if isinstance(error, ReopenError) and self.monitor.is_lost:
            error = UserError(f"{error}, and can't: {STORE_LOST}; start the run again")
        failure = self.monitor.report_exception(error)
        self._exit_code = failure.exit_code
        sys.excepthook = _print_unreported_error  # a script that catches nothing would repeat it on each rank
        return ReportedError(failure.text, failure.exit_code)

    def fail_ranks_and_must_exit(self, text: str) -> bool:
        """End all ranks with a message, or the hanging ones (`Processes.fail_ranks_and_must_exit`)."""
        if self.survives_losses and (hanging := self.monitor.declare_awaited_ranks_lost()):
            log.error("%s", text)
            return self.launch.rank in hanging
        self.monitor.report_failure(text)
        return True

    def _list_spare_gpus(self) -> list[torch.device]:
        """Return the GPUs for hot spares on this machine."""
        count = self.launch.local_world_size if self.launch.spares and self.device.backend == "nccl" else 0
        return [torch.device("cuda", index) for index in range(count)]

    def _check_gpus_survive_losses(self) -> None:
        """Raise UserError if processes share a GPU: its kernels waiting for a lost rank do not end."""
        if self.device.backend == "nccl" and self.device.shares_gpu and not self.launch.is_single_process:
            raise UserError(
                "on_failure: 'continue' needs a GPU for each process, and some share one; start fewer processes, or "
                "write on_failure = 'stop'",
                exit_code=2,
            )

    def _start_monitor_and_connect_stores(self) -> RankMonitor:
        """Start this rank's monitor; a single process's monitor has neither store nor thread."""
        launch = self.launch
        monitor = RankMonitor(self.launch.rank, self.launch.world_size, error_file=launch.error_file)
        if self.groups.is_joined:
            world = self.groups.make_group("world", [range(self.launch.world_size)])
            own = RunProcess.from_launch(launch, is_member=True)
            processes = world.gather_json([secrets.token_hex(8), attrs.asdict(own)])
            # a store may outlive a launch, and a process may open several runs
            members = [RunProcess(**values) for _, values in processes]
            self.generation = Generation(processes[0][0], 0, members)
            RUNS[self.generation.run] = None if launch.agent_store else dist.distributed_c10d._get_default_store()
            monitor = self._start_membership(self.generation, self.groups.connections).monitor
            if self.survives_losses:
                import torch._dynamo  # noqa: F401

                gc.freeze()  # a recovery's collections would walk through its million objects
                self._control = connect_to_launch_store(launch.address, launch.port, launch.attempt, self.timeout)
            self._connect_stores(self.generation)
            if self.survives_losses:
                self._control.set(CURRENT, self.generation.to_json())
                if launch.agent_store:
                    self._control.set(CONTINUES, b"1")
        return monitor

    def _start_membership(self, generation: Generation, connections: Connections) -> Membership:
        """Start a monitor for a generation with this process; a loss breaks the connections if the run survives it."""
        return start_membership(self.launch, generation, connections, self.timeout, self.heartbeat_timeout)

    def _connect_stores(self, generation: Generation) -> None:
        """Connect to the launch's store for point-to-point channels and, if losses are survived, for spares."""
        launch = self.launch
        if self.survives_losses:
            # before the connection below, which a loss may break: the next agreement needs it
            self._spares = Spares(PrefixStore(generation.run, self._control))
        with self.groups.connections.record_sockets():  # broken at a loss: a rank may wait for a lost one to connect
            store = connect_to_launch_store(launch.address, launch.port, f"{generation.name}/p2p", self.timeout)
        self.groups.store = store

    def _join_generation_groups(self, membership: Membership) -> None:
        """Join the groups of a generation after the first one."""
        self.generation, self.monitor = membership.generation, membership.monitor
        RUNS.setdefault(self.generation.run)
        self._control = membership.control
        self.generation.set_rank_environment(self.monitor.rank)
        self.launch = read_launch()
        self.device.make_current()
        self.groups = self._create_group_factory(membership.connections)
        self.groups.monitor = self.monitor
        self._connect_stores(self.generation)
        if not self.launch.is_single_process:
            self.groups.join(self.groups.store)

    def _connect_store_with_own_keys(self) -> Any:
        """Connect to the launcher's store, with keys for this run or start; None if torch has to connect."""
        launch = self.launch
        keys = f"{next(reversed(RUNS))}/next" if RUNS else launch.attempt
        if not (RUNS or (launch.agent_store and launch.has_own_keys)):
            return None
        # torch would read addresses from an earlier run, or from before a restart: its keys stay the same (torch 2.13)
        with self.groups.connections.record_sockets():
            return connect_to_launch_store(launch.address, launch.port, keys, self.timeout)

    def _create_group_factory(self, connections: Connections) -> GroupFactory:
        """Return a factory for this process's groups, with these connections to break after a loss."""
        return GroupFactory(
            self.device, self.launch.rank, self.launch.world_size, self.timeout, self.survives_losses, connections
        )

    def _await_rank_loss(self) -> bool:
        """Return whether a loss that the run survives has broken the groups; wait for it after a collective's error."""
        monitor = self.monitor
        if self.heartbeat_timeout is None:
            return False
        end = time.monotonic() + (self.heartbeat_timeout + RECOVERY_MARGIN) * monitor.is_recovering
        while not (monitor.is_broken or monitor.failure or monitor.is_lost) and time.monotonic() < end:
            time.sleep(0.02)
        return monitor.is_broken

    def _agree_on_next_generation(self) -> ReopenError | None:
        """Agree with the other live ranks on the next generation; return the error to raise, None to end the run."""
        end, monitor = time.monotonic() + self.timeout, self.monitor
        assert self.generation is not None and self._spares is not None
        monitor.is_recovering = True
        try:
            following = agree_on_next_generation(
                self.generation,
                self.launch.rank,
                monitor.store,
                self._spares,
                losses=lambda: monitor.losses,
                is_over=lambda: monitor.failure is not None or monitor.is_lost or time.monotonic() > end,
            )
            if following is None:
                return None
            changes = self.monitor.describe_lost_ranks(), self.generation.describe_membership_change_to(following)
            text = "; ".join(filter(None, changes))
            if log.hasHandlers():  # not while the graph opens, when Python would print the message a second time
                log.warning("%s", text, extra={PRINTED: True})
            monitor.stop_polling()  # it would kill ranks that have left this generation earlier
            if RunProcess.of_this_process() not in following.members:
                self.next = "spare"
                return ReopenError(f"{text}; rank {self.launch.rank} waits as a spare")
            membership = self._start_membership(following, Connections(self.launch.port))
            self._control.set(CURRENT, following.to_json())  # spares listen to the newest generation
            self.next = attrs.evolve(membership, control=self._control)
            monitor.wait_until_lost_processes_end()  # the new monitor sends heartbeats meanwhile
        except RuntimeError:  # the store was in a lost process
            return None
        if self.next.monitor.rank == 0:
            print_escaped_text(text, "stderr")
        return ReopenError(f"{text} if `drawloom run` started them")


def _print_unreported_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught error as `sys.excepthook` does, unless it was already reported."""
    if not isinstance(error, ReportedError):
        sys.__excepthook__(kind, error, trace)
