"""The processes in a torchrun launch, or a single process; owns torch's default process group."""

import logging
import os
import secrets
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Literal

import attrs
import torch
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
from drawloom.components.distributed.launch_store import (
    call_store_with_timeout,
    connect_to_launch_store,
    shorten_dns_retry_timeout,
)
from drawloom.components.distributed.p2p_links import TorchCommunicator, TorchP2PChannel, connect_two_ranks_by_nccl
from drawloom.components.distributed.parent import start_exit_with_parent_thread
from drawloom.components.distributed.process_group import (
    SingleProcess,
    TorchGroup,
    convert_if_collective_error,
    mark_blocked_and_convert_errors,
)
from drawloom.components.distributed.rank_monitor import STORE_TIMEOUT, RankMonitor
from drawloom.components.distributed.spare import import_early, wait_as_spare
from drawloom.components.distributed.torchrun import CONTINUES, Launch, read_launch
from drawloom.components.ports.distributed import Device, Group, P2PChannel, ReplicaLimit
from drawloom.components.ports.log_records import PRINTED
from drawloom.graph import Every, UserError, above, component, setting
from drawloom.graph.cli.terminal import print_escaped_text
from drawloom.graph.problems import ReopenError, ReportedError

log = logging.getLogger("drawloom.distributed")

NO_TIMEOUT = timedelta(days=30)  # torch has no unlimited timeout
NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
# Timeout for ranks that have met to connect by gloo. After a loss, an abandoned thread waits five times as long
# (measured: 15.0 s for 3 s, torch 2.13).
CONNECT_LIMIT = timedelta(seconds=30)
SURVIVING_BACKENDS = ("gloo",)  # docs/faults.md says what NCCL can't do
MEETING_TICK = 0.002  # seconds between two looks for other ranks
RECOVERY_MARGIN = 5.0  # seconds after the heartbeats' timeout, to publish a loss and to read it
RUNS: set[str] = set()  # names of this process's runs
NCCL_MARGIN = timedelta(seconds=30)  # on top of ours, before torch's NCCL watchdog kills the process


@attrs.frozen
class Membership:
    """
    A generation, and this process's monitor and connections in it, which exist before its groups.

    `control` is a connection to the launch's store, and `hosted` keeps the store alive if this process hosts it. There
    are few connections, because the store looks up a name for every new one.
    """

    generation: Generation
    monitor: RankMonitor
    connections: Connections
    control: Any = None
    hosted: Any = None


@component(impact="safe")
class TorchProcesses:
    """
    Processes described by torchrun's variables, or a single process if the variables are unset.

    With `on_failure` "continue", the ranks left after a loss agree on the next generation of processes, and raise a
    ReopenError: the graph is opened again with these processes, renumbered, and perhaps with fewer shards. A process
    that starts later waits in `open` until a generation admits it. This works with gloo.
    """

    device: Device
    limits: Every[ReplicaLimit] = attrs.field(factory=Every)
    timeout: float = setting(
        default=600.0, check=above(0), doc="seconds until a collective that waits for other ranks fails"
    )
    _on_failure: Literal["stop", "continue"] = setting(
        default="stop",
        alias="on_failure",
        doc="after the loss of a process: end the run, or continue it with the processes that are left (gloo)",
    )
    heartbeat_timeout: float = setting(
        default=15.0,
        check=above(0),
        doc="seconds without a heartbeat after which a process counts as lost, with on_failure = 'continue'",
    )

    _launch: Launch = attrs.field(init=False, factory=Launch)
    _joined: bool = attrs.field(init=False, default=False)
    _limit: timedelta = attrs.field(init=False)
    # torch's process groups by the sets of ranks for which they were made
    _handles: dict[tuple[tuple[int, ...], ...], Any] = attrs.field(init=False, factory=dict)
    _communicators: dict[str, TorchCommunicator] = attrs.field(init=False, factory=dict)
    _store: Any = attrs.field(init=False, default=None)
    _monitor: RankMonitor = attrs.field(init=False, factory=RankMonitor)
    replica_shape: tuple[int, int, int, int] | None = attrs.field(init=False, default=None)
    _connections: Connections = attrs.field(init=False, factory=Connections)
    _generation: Generation | None = attrs.field(init=False, default=None)
    _control: Any = attrs.field(init=False, default=None)  # connection to the launch's store
    _spares: Spares | None = attrs.field(init=False, default=None)
    # a membership in the next generation, or "spare" for a process without one; None unless the graph is reopened
    _next: Membership | Literal["spare"] | None = attrs.field(init=False, default=None)
    _exit_code: int = attrs.field(init=False, default=0)
    _hosted: Any = attrs.field(init=False, default=None)
    _meetings: Counter[str] = attrs.field(init=False, factory=Counter)

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
            self._check_backend_survives_losses()
            shorten_dns_retry_timeout()
            os.environ[NCCL_ERROR_HANDLING] = "0"  # by default, NCCL's watchdog ends a process that loses a peer
        elif self._launch.spares:
            raise UserError(
                f"the launcher has {self._launch.spares} spare(s) for lost processes (--spares), and on_failure = "
                "'stop' ends the run with a loss; write on_failure = 'continue'",
                exit_code=2,
            )
        if self._launch.address:
            start_exit_with_parent_thread(os.getppid())
        self._limit = self._get_torch_timeout(self.timeout)
        if dist.is_initialized():
            raise UserError(
                "torch has a default process group already, and this run would change it; call "
                "torch.distributed.destroy_process_group() first"
            )
        membership, self._next = self._next, None
        if not isinstance(membership, Membership):
            membership = self._wait_to_join_running_generation(is_member=membership == "spare")
        if membership is None:
            self._connections = Connections(self._launch.port)
            if not self._launch.is_single_process:
                self._join_process_group()
            self._monitor = self._start_monitor_and_connect_stores()
        else:
            self._join_generation_groups(membership)

    def close(self) -> None:
        """Destroy the process group and stop the monitor."""
        if self._next is None:
            self._monitor.announce_exit()
            if self._spares is not None and self.rank == 0:
                call_store_with_timeout(STORE_TIMEOUT, partial(self._spares.announce_run_end, self._exit_code))
        if self._joined:
            self._joined = False
            self._handles = {}
            self._close_communicators()
            dist.destroy_process_group()
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

    def can_grow_with_spares(self) -> bool:
        if self._generation is None or self._spares is None or self.rank > 0:
            return False
        generation = attrs.evolve(self._generation, shape=self._find_replica_shape())
        return (
            len(generation.choose_next_generation(set(), self._spares.find_waiting_spares().values()).members)
            > self.world_size
        )

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
            failure = self._monitor.report_exception(error)
            self._exit_code = failure.exit_code
            sys.excepthook = _print_unreported_error  # a script that catches nothing would repeat it on each rank
            return ReportedError(failure.text, failure.exit_code)
        if not isinstance(error, UserError) and log.hasHandlers():
            # Python prints the traceback on the terminal
            log.error("%s", error, exc_info=error, extra={PRINTED: True})
        return None

    def make_group(self, name: str, rank_sets: Sequence[Sequence[int]]) -> Group:
        own = next(ranks for ranks in rank_sets if self.rank in ranks)
        if len(own) == 1 and all(len(ranks) == 1 for ranks in rank_sets):
            return SingleProcess()
        key = tuple(map(tuple, rank_sets))
        if key not in self._handles:
            self._handles[key] = self._make_torch_group(name, own, rank_sets)
        if len(own) == 1:
            return SingleProcess()
        return TorchGroup(name, own, self._handles[key], self._tensor_device, self._monitor)

    def open_channel(self, name: str, first: int, second: int) -> P2PChannel:
        up, down = (
            self._get_or_connect_communicator(name, first, second),
            self._get_or_connect_communicator(name, second, first),
        )
        return TorchP2PChannel(up, down) if self.rank == first else TorchP2PChannel(down, up)

    def make_control_group(self, name: str) -> Group:
        if not self._joined:
            return SingleProcess()
        ranks = list(range(self.world_size))
        with self._wait_for_ranks_and_record_connections(f"control {name}", ranks, NO_TIMEOUT) as timeout:
            handle = dist.new_group(ranks, backend="gloo", timeout=timeout)
        _set_group_timeout(handle, NO_TIMEOUT)
        return TorchGroup(name, ranks, handle, torch.device("cpu"), self._monitor)

    def set_timeout(self, seconds: float) -> None:
        self._limit = self._get_torch_timeout(seconds)
        for handle in dict.fromkeys([dist.group.WORLD, *filter(None, self._handles.values())] if self._joined else []):
            _set_group_timeout(handle, self._limit)
        for communicator in self._communicators.values():
            communicator.backend._set_default_timeout(self._limit)

    def record_step_and_phase(self, location: str) -> None:
        self._monitor.location = location

    def diagnose_hang(self) -> str:
        return self._monitor.describe_ranks_to_blame()

    def fail_all_or_hanging_ranks(self, text: str) -> bool:
        if self._monitor.store is None:
            log.error("%s", text)
            return True
        if self.survives_rank_losses and (hanging := self._monitor.declare_awaited_ranks_lost()):
            log.error("%s", text)
            return self.rank in hanging
        self._monitor.report_failure(text)
        return True

    def _check_backend_survives_losses(self) -> None:
        """Raise UserError if the backend's groups can't be made again after a loss."""
        backend = self.device.backend
        if backend not in SURVIVING_BACKENDS and not self._launch.is_single_process:
            raise UserError(
                f"on_failure: 'continue' needs device.backend = 'gloo', and the backend is {backend!r}; write "
                "on_failure = 'stop'",
                exit_code=2,
            )

    def _get_torch_timeout(self, seconds: float) -> timedelta:
        """Return torch's timeout: `seconds`, and with NCCL a margin, because our own diagnosis must come first."""
        # With NCCL no host thread waits, and torch's watchdog kills a process whose device waits too long. The margin
        # lets the timeouts listener end the run first, with a diagnosis.
        limit = timedelta(seconds=seconds)
        return limit + NCCL_MARGIN if self.device.backend == "nccl" else limit

    def _start_monitor_and_connect_stores(self) -> RankMonitor:
        """Start this rank's monitor; a single process's monitor has neither store nor thread."""
        launch = self._launch
        monitor = RankMonitor(self.rank, self.world_size, error_file=launch.error_file)
        if self._joined:
            world = TorchGroup("world", range(self.world_size), dist.group.WORLD, self._tensor_device, monitor)
            own = RunProcess.of_this_process()
            processes = world.gather_json([secrets.token_hex(8), own.machine, own.pid])
            # a store may outlive a launch, and a process may open several runs
            members = [RunProcess(machine, pid) for _, machine, pid in processes]
            self._generation = Generation(processes[0][0], 0, members)
            monitor = self._start_generation_monitor(self._generation, self._connections).monitor
            if self.survives_rank_losses:
                import_early()
                self._control = connect_to_launch_store(launch.address, launch.port, launch.attempt, self.timeout)
            self._connect_stores(self._generation)
            if self.survives_rank_losses and not launch.agent_store:
                self._hosted = dist.distributed_c10d._get_default_store()
            if self.survives_rank_losses and launch.agent_store:
                self._control.set(CONTINUES, b"1")
        return monitor

    def _start_generation_monitor(self, generation: Generation, connections: Connections) -> Membership:
        """Start a monitor for a generation with this process."""
        launch, own = self._launch, RunProcess.of_this_process()
        rank = generation.members.index(own)
        peers = {
            number: member.pid
            for number, member in enumerate(generation.members)
            if member.machine == own.machine and number != rank
        }
        monitor = RankMonitor(
            rank,
            len(generation.members),
            connect_to_launch_store(launch.address, launch.port, generation.name, self.timeout),
            peers,
            error_file=launch.error_file,
            where=f", on host {self.node_rank}, {socket.gethostname()}" if self.node_count > 1 else "",
        )
        if self.survives_rank_losses:
            monitor.on_loss = connections.break_all_connections
            monitor.heartbeat_timeout = self.heartbeat_timeout
        monitor.start()
        return Membership(generation, monitor, connections)

    def _connect_stores(self, generation: Generation) -> None:
        """Connect to the launch's store for point-to-point channels and, if losses are survived, for spares."""
        launch = self._launch
        RUNS.add(generation.run)
        if self.survives_rank_losses:
            # before the connection below, which a loss may break: the next agreement needs it
            self._spares = Spares(PrefixStore(generation.run, self._control))
            self._control.set(CURRENT, generation.to_json())
        with self._connections.record_sockets():  # broken at a loss: a rank may wait for a lost one to connect
            self._store = connect_to_launch_store(launch.address, launch.port, f"{generation.name}/p2p", self.timeout)

    def _join_generation_groups(self, membership: Membership) -> None:
        """Join the groups of a generation after the first one."""
        self._generation, self._monitor = membership.generation, membership.monitor
        self._connections, self._control, self._hosted = membership.connections, membership.control, membership.hosted
        self._generation.set_rank_environment(self._monitor.rank)
        self._launch = read_launch()
        self._connect_stores(self._generation)
        if not self._launch.is_single_process:
            self._join_process_group()

    def _wait_to_join_running_generation(self, *, is_member: bool) -> Membership | None:
        """
        Wait as a spare until a generation admits this process.

        Return None if the launch has no run yet. `is_member` is True for a former member of the run. Raises
        ReportedError when the run ends, and UserError if its processes are gone.
        """
        launch = self._launch
        hosts_store = launch.rank == 0 and not launch.agent_store  # it starts with the process group
        if not (self.survives_rank_losses and launch.address) or (hosts_store and not is_member):
            return None
        store = connect_to_launch_store(launch.address, launch.port, launch.attempt, self.timeout)
        if not store.check([CURRENT]):
            return None
        generation = Generation.from_json(store.get(CURRENT).decode())
        if generation.run in RUNS and not is_member:
            return None
        outcome = wait_as_spare(store, generation.run, self.heartbeat_timeout + RECOVERY_MARGIN)
        return attrs.evolve(self._start_generation_monitor(outcome, Connections(launch.port)), control=store)

    def _await_rank_loss(self) -> bool:
        """Return whether a loss that the run survives has broken the groups; wait for it after a collective's error."""
        monitor = self._monitor
        if not self.survives_rank_losses:
            return False
        end = time.monotonic() + (self.heartbeat_timeout + RECOVERY_MARGIN) * monitor.is_recovering
        while not (monitor.is_broken or monitor.failure or monitor.is_lost) and time.monotonic() < end:
            time.sleep(0.02)
        return monitor.is_broken

    def _find_replica_shape(self) -> ReplicaShape | None:
        """Return the shape of replicas; the first generation finds it, once its graph is open."""
        assert self._generation is not None
        if self._generation.shape or self.replica_shape is None:
            return self._generation.shape
        stages, shards, shard_size, expert = self.replica_shape
        largest = self.world_size // (stages * shard_size)
        fitting = [
            count
            for count in range(1, largest + 1)
            if count == largest or all(limit.can_divide_among_replicas(count) for limit in self.limits.values())
        ]
        return ReplicaShape(stages, shards, shard_size, fitting, expert)

    def _agree_on_next_generation(self) -> ReopenError | None:
        """Agree with the other live ranks on the next generation; return the error to raise, None to end the run."""
        end, monitor = time.monotonic() + self.timeout, self._monitor
        assert self._generation is not None and self._spares is not None
        monitor.is_recovering = True
        try:
            following = agree_on_next_generation(
                attrs.evolve(self._generation, shape=self._find_replica_shape()),
                self.rank,
                monitor.store,
                self._spares,
                losses=lambda: monitor.losses,
                is_over=lambda: monitor.failure is not None or monitor.is_lost or time.monotonic() > end,
            )
            if following is None:
                return None
            text = self._describe_generation_change(following)
            if log.hasHandlers():  # not while the graph opens, when Python would print the message a second time
                log.warning("%s", text, extra={PRINTED: True})
            if RunProcess.of_this_process() not in following.members:
                self._next = "spare"
                return ReopenError(f"{text}; rank {self.rank} waits as a spare")
            membership = self._start_generation_monitor(following, Connections(self._launch.port))
            self._next = attrs.evolve(membership, control=self._control, hosted=self._hosted)
        except RuntimeError:  # the store was in a lost process
            return None
        if self._next.monitor.rank == 0:
            print_escaped_text(text, "stderr")
        return ReopenError(f"{text} if `drawloom run` started them")

    def _describe_generation_change(self, following: Generation) -> str:
        """Return a message about lost ranks, continuing ones, and admitted spares."""
        assert self._generation is not None
        new = [member for member in following.members if member not in self._generation.members]
        kept = len(following.members) - len(new)
        joining = f"{len(new)} process{'es join' if len(new) > 1 else ' joins'}" if new else ""
        staying = f"{kept} of {self.world_size} processes continue"
        return "; ".join(filter(None, [self._monitor.describe_lost_ranks(), staying, joining]))

    def _join_process_group(self) -> None:
        """Make torch's default process group, after the first generation over a store connection of our own."""
        bound = self.device.device if self.device.backend == "nccl" else None
        arguments: Mapping[str, Any] = {}
        hook = sys.excepthook
        try:
            with self._wait_for_ranks_and_record_connections("world", range(self.world_size), self._limit) as timeout:
                if self._generation is not None:
                    store = PrefixStore("world", self._store)
                    arguments = {"store": store, "rank": self.rank, "world_size": self.world_size}
                dist.init_process_group(self.device.backend, timeout=timeout, device_id=bound, **arguments)
            _set_group_timeout(dist.group.WORLD, self._limit)
        except RuntimeError as error:  # torch's errors of the network and the store are subclasses
            dist.distributed_c10d._world.group_count = 0  # torch numbers groups, and their names must agree later
            self._monitor.is_recovering = True
            raise UserError(
                f"rank {self.rank} did not reach all {self.world_size} ranks within {self.timeout:g} s; is "
                f"MASTER_ADDR the same on all, and reachable? torch says: {str(error).strip().splitlines()[0]}"
            ) from error
        finally:
            sys.excepthook = hook  # torch adds a prefix to it in each process group
        self._joined = True

    @contextmanager
    def _wait_for_ranks_and_record_connections(
        self, name: str, ranks: Sequence[int], limit: timedelta
    ) -> Iterator[timedelta]:
        """
        Record the connections made in the body, in which `ranks` make a group, and return the body's timeout.

        If the run survives losses, wait for the ranks beforehand, which may be lost or late. A loss ends this wait, and
        the body's, with a RuntimeError.
        """
        if not self.survives_rank_losses or self._store is None:
            with self._connections.record_sockets():
                yield limit
            return
        self._meetings[name] += 1
        key = f"met/{name}/{self._meetings[name]}"
        self._store.set(f"{key}/{self.rank}", b"1")
        end = time.monotonic() + self.timeout
        with self._monitor.mark_blocked("the making", name):
            while not (self._connections.is_broken or self._store.check([f"{key}/{rank}" for rank in ranks])):
                if time.monotonic() > end:
                    raise RuntimeError(f"not all ranks came to make group {name} within {self.timeout:g} s")
                time.sleep(MEETING_TICK)
            with self._connections.record_sockets(), self._connections.make_gloo_connecting_interruptible():
                yield min(limit, CONNECT_LIMIT) if self.device.backend == "gloo" else limit

    @property
    def _tensor_device(self) -> torch.device:
        """The device whose tensors the backend accepts."""
        return self.device.device if self.device.backend == "nccl" else torch.device("cpu")

    def _make_torch_group(self, name: str, own_ranks: Sequence[int], rank_sets: Sequence[Sequence[int]]) -> Any:
        """Make torch's process group for the set with this rank, and return it; None if the set is this rank alone."""
        if len(own_ranks) == self.world_size:
            return dist.group.WORLD
        if self.device.backend == "nccl":
            # one split makes the groups of all sets; new_group would split the world's communicator once for each set
            parts = [list(ranks) for ranks in rank_sets]
            with self._wait_for_ranks_and_record_connections(name, range(self.world_size), self._limit) as timeout:
                return dist.split_group(split_ranks=parts, timeout=timeout, group_desc=name)
        if len(own_ranks) == 1:
            return None
        # without local synchronization, every rank would have to make every group
        with self._wait_for_ranks_and_record_connections(name, own_ranks, self._limit) as timeout:
            handle = dist.new_group(list(own_ranks), timeout=timeout, use_local_synchronization=True)
        _set_group_timeout(handle, self._limit)
        return handle

    def _get_or_connect_communicator(self, name: str, sender: int, receiver: int) -> TorchCommunicator:
        """Return the one-way communicator with this name between two ranks, connected at the first call."""
        key = f"{name} {sender}->{receiver}"
        if key not in self._communicators:
            self._communicators[key] = self._connect_ranks(key, (sender, receiver))
        return self._communicators[key]

    def _connect_ranks(self, name: str, ranks: tuple[int, int]) -> TorchCommunicator:
        """Connect a one-way communicator by one transfer between its two ranks, and return it."""
        if self._tensor_device.type != self.device.device.type:
            text = f"ranks on {self.device.device.type} can't send tensors to one another over"
            raise UserError(f"{text} {self.device.backend!r}; write backend = 'nccl' in [device]", exit_code=2)
        with (
            mark_blocked_and_convert_errors(self._monitor, "a connection", name, ranks),
            self._wait_for_ranks_and_record_connections(name, ranks, self._limit) as timeout,
        ):
            store, rank = PrefixStore(name, self._store), ranks.index(self.rank)
            if self.device.backend == "gloo":
                backend = self._connections.connect_in_thread_until_broken(
                    lambda: dist.ProcessGroupGloo(store, rank, 2, timeout)
                )
            else:
                backend = connect_two_ranks_by_nccl(store, rank, ranks, timeout, self._tensor_device)
        backend._set_default_timeout(self._limit)
        communicator = TorchCommunicator(name, ranks, backend, self._tensor_device, self._monitor)
        # the first transfer connects the two ranks, so it happens here, where all ranks follow one order
        probe = torch.zeros(1, device=self._tensor_device)
        (communicator.send(probe) if self.rank == ranks[0] else communicator.receive(probe)).wait()
        return communicator

    def _close_communicators(self) -> None:
        """Shut down all point-to-point communicators."""
        communicators, self._communicators = self._communicators, {}
        # destroy_process_group does not know these backends; gloo's backends close when they are freed
        for communicator in communicators.values() if self.device.backend == "nccl" else ():
            communicator.backend.shutdown()


def _set_group_timeout(group: Any, timeout: timedelta) -> None:
    """Set a process group's timeout."""
    # torch 2.14 has a public function, and warns of the private one.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)


def _print_unreported_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught error as `sys.excepthook` does, unless it was already reported."""
    if not isinstance(error, ReportedError):
        sys.__excepthook__(kind, error, trace)
