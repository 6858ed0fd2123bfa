"""The processes in a torchrun launch, or a single process; owns torch's default process group."""

import gc
import logging
import os
import secrets
import sys
import time
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal

import attrs
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from drawloom.components.distributed.connections import Connections
from drawloom.components.distributed.generations import (
    CURRENT,
    Generation,
    ReplicaShape,
    RunProcess,
    Spares,
    agree_on_next_generation,
)
from drawloom.components.distributed.group_factory import GroupFactory
from drawloom.components.distributed.launch_store import (
    call_store_with_timeout,
    connect_to_launch_store,
    set_short_dns_timeout_variable,
)
from drawloom.components.distributed.membership import (
    RECOVERY_MARGIN,
    RUNS,
    Membership,
    start_membership,
    wait_to_join_running_generation,
)
from drawloom.components.distributed.parent import start_exit_with_parent_thread
from drawloom.components.distributed.process_group import (
    convert_if_collective_error,
)
from drawloom.components.distributed.rank_monitor import STORE_LOST, STORE_TIMEOUT, RankMonitor
from drawloom.components.distributed.spare import import_early_and_freeze_gc
from drawloom.components.distributed.torchrun import CONTINUES, Launch, read_launch
from drawloom.components.ports.distributed import Device, Group, P2PChannel, ReplicaLimit
from drawloom.components.ports.log_records import PRINTED
from drawloom.graph import Every, UserError, above, component, setting
from drawloom.graph.cli.terminal import print_escaped_text
from drawloom.graph.garbage import free_closed_graphs
from drawloom.graph.problems import ReopenError, ReportedError

log = logging.getLogger("drawloom.distributed")

NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@component(impact="safe")
class TorchProcesses:
    """
    Processes described by torchrun's variables, or a single process if the variables are unset.

    With `on_failure` "continue", the ranks left after a loss agree on the next generation of processes, and raise a
    ReopenError: the graph is opened again with these processes, renumbered, and perhaps with fewer shards. A process
    that starts later waits in `open` until a generation admits it. With NCCL each process needs a GPU of its own.
    """

    device: Device
    limits: Every[ReplicaLimit] = attrs.field(factory=Every)
    timeout: float = setting(
        default=600.0, check=above(0), doc="seconds until a collective that waits for other ranks fails"
    )
    _on_failure: Literal["stop", "continue"] = setting(
        default="stop",
        alias="on_failure",
        doc="after the loss of a process: end the run, or continue it with the processes that are left",
    )
    heartbeat_timeout: float = setting(
        default=15.0,
        check=above(0),
        doc="seconds without a heartbeat after which a process counts as lost, with on_failure = 'continue'",
    )

    _launch: Launch = attrs.field(init=False, factory=Launch)
    _groups: GroupFactory = attrs.field(
        init=False, default=attrs.Factory(lambda self: GroupFactory(self.device), takes_self=True)
    )
    _monitor: RankMonitor = attrs.field(init=False, factory=RankMonitor)
    _generation: Generation | None = attrs.field(init=False, default=None)
    _control: Any = attrs.field(init=False, default=None)  # connection to the launch's store
    _spares: Spares | None = attrs.field(init=False, default=None)
    # a membership in the next generation, or "spare" for a process without one; None unless the graph is reopened
    _next: Membership | Literal["spare"] | None = attrs.field(init=False, default=None)
    _exit_code: int = attrs.field(init=False, default=0)

    @property
    def rank(self) -> int:
        return self._launch.rank

    @property
    def world_size(self) -> int:
        return self._launch.world_size

    @property
    def local_rank(self) -> int:
        return self._launch.local_rank

    @property
    def local_world_size(self) -> int:
        return self._launch.local_world_size

    @property
    def node_rank(self) -> int:
        return self._launch.node_rank

    @property
    def node_count(self) -> int:
        return self._launch.node_count

    def open(self) -> None:
        """Join the process group, if there are other processes. Raises UserError if they do not join in time."""
        self._launch = read_launch()
        if self.survives_rank_losses:
            self._check_gpus_survive_losses()
            set_short_dns_timeout_variable()
            os.environ[NCCL_ERROR_HANDLING] = "0"  # by default, NCCL's watchdog ends a process that loses a peer
        elif self._launch.spares:
            raise UserError(
                f"the launcher has {self._launch.spares} spare(s) for lost processes (--spares), and on_failure = "
                "'stop' ends the run with a loss; write on_failure = 'continue'",
                exit_code=2,
            )
        if self._launch.address:
            start_exit_with_parent_thread(os.getppid())
        if dist.is_initialized():
            raise UserError(
                "torch has a default process group already, and this run would change it; call "
                "torch.distributed.destroy_process_group() first"
            )
        membership, self._next = self._next, None
        if self.survives_rank_losses and not isinstance(membership, Membership):
            membership = wait_to_join_running_generation(
                self._launch, self.timeout, self.heartbeat_timeout, is_member=membership == "spare"
            )
        if isinstance(membership, Membership):
            self._join_generation_groups(membership)
        else:
            if RUNS:
                free_closed_graphs()  # with the groups of earlier runs, whose threads poll their connections
            self._groups = self._create_group_factory(Connections(self._launch.port))
            if not self._launch.is_single_process:
                self._groups.join(self._connect_store_with_own_keys())
            self._monitor = self._groups.monitor = self._start_monitor_and_connect_stores()

    def close(self) -> None:
        """Destroy the process group and stop the monitor."""
        if self._next is None:
            self._monitor.announce_exit()
            if self.survives_rank_losses:
                gc.unfreeze()  # frozen in `open` for recoveries; kept for good, groups would outlive their run
            if self._spares is not None and self.rank == 0:
                call_store_with_timeout(STORE_TIMEOUT, partial(self._spares.announce_run_end, self._exit_code))
        self._groups.close()
        # stopped last: after a failure, the monitor kills a process that hangs in one of the calls above
        self._monitor.close()
        self._monitor = RankMonitor()

    @property
    def survives_rank_losses(self) -> bool:
        return self._on_failure == "continue"

    @property
    def generation(self) -> int:
        return self._generation.number if self._generation else 0

    @property
    def remaining_shards(self) -> int | None:
        return self._generation.shards if self._generation else None

    def set_replica_shape(self, stages: int, shards: int, shard_size: int, expert: int) -> None:
        if (before := self._generation) is None or before.shape:
            return
        limits = self.limits.values()
        shape = ReplicaShape.with_fitting_counts(
            self.world_size,
            (stages, shards, shard_size, expert),
            lambda count: all(limit.supports_replica_count(count) for limit in limits),
        )
        self._generation = attrs.evolve(before, shape=shape)
        if self.survives_rank_losses:  # spares need the shape if all members are lost
            self._control.compare_set(CURRENT, before.to_json(), self._generation.to_json())

    def can_grow_with_spares(self) -> bool:
        if self._generation is None or self._spares is None or self.rank > 0:
            return False
        following = self._generation.choose_next_generation(set(), self._spares.find_waiting_spares().values())
        return len(following.members) > self.world_size

    def hand_over(self) -> Membership | Literal["spare"] | None:
        """Return the membership in the next generation, for the reopened node; "spare" for a process without one."""
        return self._next

    def take_over(self, values: Membership | Literal["spare"] | None) -> None:
        """Keep the membership; `open` joins its generation instead of all ranks."""
        self._next = values

    def on_failure(self, error: BaseException) -> BaseException | None:
        """
        Report this rank's failure, which ends all ranks, and return a ReportedError if there are several ranks.

        If the run survives a loss, or lets spares join, return a ReopenError instead.
        """
        if not isinstance(error, Exception):
            return None
        if self._monitor.store is not None:
            error = convert_if_collective_error(error, self._monitor)  # gives the monitor time to notice a killed rank
            if (isinstance(error, ReopenError) or self._await_rank_loss()) and (
                outcome := self._agree_on_next_generation()
            ):
                return outcome
            if isinstance(error, ReopenError) and self._monitor.is_lost:
                error = UserError(f"{error}, and can't: {STORE_LOST}; start the run again")
            failure = self._monitor.report_exception(error)
            self._exit_code = failure.exit_code
            sys.excepthook = _print_unreported_error  # a script that catches nothing would repeat it on each rank
            return ReportedError(failure.text, failure.exit_code)
        if not isinstance(error, UserError) and log.hasHandlers():
            # Python prints the traceback on the terminal
            log.error("%s", error, exc_info=error, extra={PRINTED: True})
        return None

    def make_group(self, name: str, rank_sets: Sequence[Sequence[int]]) -> Group:
        return self._groups.make_group(name, rank_sets)

    def open_channel(self, name: str, first: int, second: int) -> P2PChannel:
        return self._groups.open_channel(name, first, second)

    def make_control_group(self, name: str) -> Group:
        return self._groups.make_control_group(name)

    def set_timeout(self, seconds: float) -> None:
        self._groups.set_timeout(seconds)

    def record_step_and_phase(self, location: str) -> None:
        self._monitor.location = location

    def diagnose_hang(self) -> str:
        return self._monitor.describe_ranks_to_blame()

    def fail_ranks_and_must_exit(self, text: str) -> bool:
        if self._monitor.store is None:
            log.error("%s", text)
            return True
        if self.survives_rank_losses and (hanging := self._monitor.declare_awaited_ranks_lost()):
            log.error("%s", text)
            return self.rank in hanging
        self._monitor.report_failure(text)
        return True

    def _check_gpus_survive_losses(self) -> None:
        """Raise UserError if processes share a GPU: its kernels waiting for a lost rank do not end."""
        if self.device.backend != "nccl":
            return
        if self._launch.spares:
            raise UserError(
                f"the launcher has {self._launch.spares} spare(s), which would start on other processes' GPUs; leave "
                "out --spares: --max-restarts starts a lost process again, on its GPU",
                exit_code=2,
            )
        if self.device.shares_gpu and not self._launch.is_single_process:
            raise UserError(
                "on_failure: 'continue' needs a GPU for each process, and some share one; start fewer processes, or "
                "write on_failure = 'stop'",
                exit_code=2,
            )

    def _start_monitor_and_connect_stores(self) -> RankMonitor:
        """Start this rank's monitor; a single process's monitor has neither store nor thread."""
        launch = self._launch
        monitor = RankMonitor(self.rank, self.world_size, error_file=launch.error_file)
        if self._groups.is_joined:
            world = self._groups.make_group("world", [range(self.world_size)])
            own = RunProcess.of_this_process()
            processes = world.gather_json([secrets.token_hex(8), own.machine, own.pid])
            # a store may outlive a launch, and a process may open several runs
            members = [RunProcess(machine, pid) for _, machine, pid in processes]
            self._generation = Generation(processes[0][0], 0, members)
            RUNS[self._generation.run] = None if launch.agent_store else dist.distributed_c10d._get_default_store()
            monitor = self._start_membership(self._generation, self._groups.connections).monitor
            if self.survives_rank_losses:
                import_early_and_freeze_gc()
                self._control = connect_to_launch_store(launch.address, launch.port, launch.attempt, self.timeout)
            self._connect_stores(self._generation)
            if self.survives_rank_losses:
                self._control.set(CURRENT, self._generation.to_json())
                if launch.agent_store:
                    self._control.set(CONTINUES, b"1")
        return monitor

    def _start_membership(self, generation: Generation, connections: Connections) -> Membership:
        """Start a monitor for a generation with this process; a loss breaks the connections if the run survives it."""
        heartbeat_timeout = self.heartbeat_timeout if self.survives_rank_losses else None
        return start_membership(self._launch, generation, connections, self.timeout, heartbeat_timeout)

    def _connect_stores(self, generation: Generation) -> None:
        """Connect to the launch's store for point-to-point channels and, if losses are survived, for spares."""
        launch = self._launch
        if self.survives_rank_losses:
            # before the connection below, which a loss may break: the next agreement needs it
            self._spares = Spares(PrefixStore(generation.run, self._control))
        with self._groups.connections.record_sockets():  # broken at a loss: a rank may wait for a lost one to connect
            store = connect_to_launch_store(launch.address, launch.port, f"{generation.name}/p2p", self.timeout)
        self._groups.store = store

    def _join_generation_groups(self, membership: Membership) -> None:
        """Join the groups of a generation after the first one."""
        self._generation, self._monitor = membership.generation, membership.monitor
        RUNS.setdefault(self._generation.run)
        self._control = membership.control
        self._generation.set_rank_environment(self._monitor.rank)
        self._launch = read_launch()
        self._groups = self._create_group_factory(membership.connections)
        self._groups.monitor = self._monitor
        self._connect_stores(self._generation)
        if not self._launch.is_single_process:
            self._groups.join(self._groups.store)

    def _connect_store_with_own_keys(self) -> Any:
        """Connect to the launcher's store, with keys for this run or start; None if torch has to connect."""
        launch = self._launch
        keys = f"{next(reversed(RUNS))}/next" if RUNS else launch.attempt
        if not (RUNS or (launch.agent_store and launch.has_own_keys)):
            return None
        # torch would read addresses from an earlier run, or from before a restart: its keys stay the same (torch 2.13)
        with self._groups.connections.record_sockets():
            return connect_to_launch_store(launch.address, launch.port, keys, self.timeout)

    def _create_group_factory(self, connections: Connections) -> GroupFactory:
        """Return a factory for this process's groups, with these connections to break after a loss."""
        return GroupFactory(
            self.device, self.rank, self.world_size, self.timeout, self.survives_rank_losses, connections
        )

    def _await_rank_loss(self) -> bool:
        """Return whether a loss that the run survives has broken the groups; wait for it after a collective's error."""
        monitor = self._monitor
        if not self.survives_rank_losses:
            return False
        end = time.monotonic() + (self.heartbeat_timeout + RECOVERY_MARGIN) * monitor.is_recovering
        while not (monitor.is_broken or monitor.failure or monitor.is_lost) and time.monotonic() < end:
            time.sleep(0.02)
        return monitor.is_broken

    def _agree_on_next_generation(self) -> ReopenError | None:
        """Agree with the other live ranks on the next generation; return the error to raise, None to end the run."""
        end, monitor = time.monotonic() + self.timeout, self._monitor
        assert self._generation is not None and self._spares is not None
        monitor.is_recovering = True
        try:
            following = agree_on_next_generation(
                self._generation,
                self.rank,
                monitor.store,
                self._spares,
                losses=lambda: monitor.losses,
                is_over=lambda: monitor.failure is not None or monitor.is_lost or time.monotonic() > end,
            )
            if following is None:
                return None
            changes = self._monitor.describe_lost_ranks(), self._generation.describe_membership_change_to(following)
            text = "; ".join(filter(None, changes))
            if log.hasHandlers():  # not while the graph opens, when Python would print the message a second time
                log.warning("%s", text, extra={PRINTED: True})
            monitor.stop_polling()  # it would kill ranks that have left this generation earlier
            if RunProcess.of_this_process() not in following.members:
                self._next = "spare"
                return ReopenError(f"{text}; rank {self.rank} waits as a spare")
            membership = self._start_membership(following, Connections(self._launch.port))
            self._control.set(CURRENT, following.to_json())  # spares listen to the newest generation
            self._next = attrs.evolve(membership, control=self._control)
            monitor.wait_until_lost_processes_end()  # the new monitor sends heartbeats meanwhile
        except RuntimeError:  # the store was in a lost process
            return None
        if self._next.monitor.rank == 0:
            print_escaped_text(text, "stderr")
        return ReopenError(f"{text} if `drawloom run` started them")


def _print_unreported_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught error as `sys.excepthook` does, unless it was already reported."""
    if not isinstance(error, ReportedError):
        sys.__excepthook__(kind, error, trace)
