"""The processes in a torchrun launch, or a single process; owns torch's default process group."""

import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from drawloom.components.distributed.connections import Connections
from drawloom.components.distributed.launch_store import connect_to_launch_store
from drawloom.components.distributed.p2p_links import TorchCommunicator, TorchP2PChannel
from drawloom.components.distributed.parent import watch_parent
from drawloom.components.distributed.process_group import (
    SingleProcess,
    TorchGroup,
    convert_collective_error,
    convert_peer_errors,
)
from drawloom.components.distributed.rank_monitor import RankMonitor
from drawloom.components.distributed.survivors import Survivors, agree_on_survivors
from drawloom.components.distributed.torchrun import CONTINUES, Launch, get_machine_id, read_launch
from drawloom.components.ports.distributed import Device, Group, P2PChannel, ReplicaLimit
from drawloom.components.ports.log_records import PRINTED
from drawloom.graph import Every, UserError, above, component, setting
from drawloom.graph.cli.terminal import print_text
from drawloom.graph.problems import ReopenError, ReportedError

log = logging.getLogger("drawloom.distributed")

NO_TIMEOUT = timedelta(days=30)  # torch has no unlimited timeout
NCCL_MARGIN = timedelta(seconds=30)  # on top of ours, before torch's NCCL watchdog kills the process


@component(impact="safe")
class TorchProcesses:
    """
    Processes described by torchrun's variables, or a single process if the variables are unset.

    With `on_failure` "continue", the ranks left after a killed process agree on the complete `replicas`, and raise a
    ReopenError: the graph is opened again with these processes, renumbered. This works with gloo.
    """

    device: Device
    limits: Every[ReplicaLimit] = attrs.field(factory=Every)
    timeout: float = setting(
        default=600.0, check=above(0), doc="seconds until a collective that waits for other ranks fails"
    )
    _on_failure: Literal["stop", "continue"] = setting(
        default="stop",
        alias="on_failure",
        doc="after a process is killed: end the run, or continue it in memory with the replicas that are left (gloo)",
    )

    _launch: Launch = attrs.field(init=False, factory=Launch)
    _joined: bool = attrs.field(init=False, default=False)
    _limit: timedelta = attrs.field(init=False)
    # torch's process groups by the sets of ranks for which they were made
    _handles: dict[tuple[tuple[int, ...], ...], Any] = attrs.field(init=False, factory=dict)
    _communicators: dict[str, TorchCommunicator] = attrs.field(init=False, factory=dict)
    _store: Any = attrs.field(init=False, default=None)
    _monitor: RankMonitor = attrs.field(init=False, factory=RankMonitor)
    replicas: Sequence[Sequence[int]] = attrs.field(init=False, factory=list)
    _connections: Connections = attrs.field(init=False, factory=Connections)
    _name: str = attrs.field(init=False, default="")  # of this launch, in the store's keys
    _survivors: Survivors | None = attrs.field(init=False, default=None)

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
        self._connections = Connections(self._launch.port)
        if self.survives_losses and self.device.backend != "gloo" and not self._launch.is_single_process:
            raise UserError(
                f"on_failure: 'continue' needs device.backend = 'gloo', and the backend is {self.device.backend!r}; "
                "write on_failure = 'stop'",
                exit_code=2,
            )
        if self._launch.address:
            watch_parent(os.getppid())
        self._limit = self._get_torch_timeout(self.timeout)
        if dist.is_initialized():
            raise UserError(
                "torch has a default process group already, and this run would change it; call "
                "torch.distributed.destroy_process_group() first"
            )
        if not self._launch.is_single_process:
            self._join_process_group()
        self._monitor = self._start_monitor()

    def close(self) -> None:
        """Destroy the process group and stop the monitor."""
        self._monitor.announce_exit()
        if self._joined:
            self._joined = False
            self._handles = {}
            self._close_communicators()
            dist.destroy_process_group()
        # stopped last: after a failure, the monitor kills a process that hangs in one of the calls above
        self._monitor.close()
        self._monitor = RankMonitor()

    @property
    def survives_losses(self) -> bool:
        return self._on_failure == "continue"

    def hand_over(self) -> Survivors | None:
        """Return the ranks that continue after a loss, for `take_over`; None if ranks have agreed on none."""
        return self._survivors

    def take_over(self, values: Survivors) -> None:
        """Keep the continuing ranks; `open` joins them instead of all ranks."""
        self._survivors = values

    def on_failure(self, error: BaseException) -> BaseException | None:
        """
        Report this rank's failure, which ends all ranks, and return a ReportedError if there are several ranks.

        If the run survives a loss, return a ReopenError instead on the ranks that continue.
        """
        if not isinstance(error, Exception):
            return None
        if self._monitor.store is not None:
            error = convert_collective_error(error, self._monitor)  # gives the monitor time to notice a killed rank
            if self._monitor.lost_ranks and (outcome := self._agree_on_survivors()):
                return outcome
            failure = self._monitor.report_exception(error)
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
        up, down = self._get_communicator(name, first, second), self._get_communicator(name, second, first)
        return TorchP2PChannel(up, down) if self.rank == first else TorchP2PChannel(down, up)

    def control_group(self, name: str) -> Group:
        if not self._joined:
            return SingleProcess()
        ranks = list(range(self.world_size))
        with self._connections.record_sockets():
            handle = dist.new_group(ranks, backend="gloo", timeout=NO_TIMEOUT)
        return TorchGroup(name, ranks, handle, torch.device("cpu"), self._monitor)

    def set_timeout(self, seconds: float) -> None:
        self._limit = self._get_torch_timeout(seconds)
        for handle in dict.fromkeys([dist.group.WORLD, *filter(None, self._handles.values())] if self._joined else []):
            # torch 2.14 has a public function, and warns of the private one.
            set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
            set_timeout(self._limit, handle)
        for communicator in self._communicators.values():
            communicator.backend._set_default_timeout(self._limit)

    def set_location(self, location: str) -> None:
        self._monitor.location = location

    def diagnose_hang(self) -> str:
        return self._monitor.diagnose()

    def fail_all_ranks(self, text: str) -> None:
        if self._monitor.store is not None:
            self._monitor.report_failure(text)
        else:
            log.error("%s", text)

    def _get_torch_timeout(self, seconds: float) -> timedelta:
        """Return torch's timeout: `seconds`, and with NCCL a margin, because our own diagnosis must come first."""
        # With NCCL no host thread waits, and torch's watchdog kills a process whose device waits too long. The margin
        # lets the timeouts listener end the run first, with a diagnosis.
        limit = timedelta(seconds=seconds)
        return limit + NCCL_MARGIN if self.device.backend == "nccl" else limit

    def _start_monitor(self) -> RankMonitor:
        """Start this rank's monitor; a single process's monitor has neither store nor thread."""
        launch = self._launch
        monitor = RankMonitor(self.rank, self.world_size, error_file=launch.error_file)
        if self._joined:
            world = TorchGroup("world", range(self.world_size), dist.group.WORLD, self._tensor_device, monitor)
            own_machine = get_machine_id() if hasattr(os, "pidfd_open") else ""
            processes = world.gather_json([secrets.token_hex(8), own_machine, os.getpid()])
            name = processes[0][0]  # a store may outlive a launch, and a process may open several runs
            peers = {rank: pid for rank, (_, where, pid) in enumerate(processes) if where == own_machine}
            monitor.store = connect_to_launch_store(launch.address, launch.port, name, self.timeout)
            self._store = connect_to_launch_store(launch.address, launch.port, f"{name}/p2p", self.timeout)
            del peers[self.rank]
            monitor.peers = peers
            self._name = name
            if self.survives_losses:
                monitor.on_loss = self._connections.shut_down_all
                if self._launch.agent_store:
                    connect_to_launch_store(launch.address, launch.port, launch.attempt, self.timeout).set(
                        CONTINUES, b"1"
                    )
            monitor.where = f", on host {self.node_rank}, {socket.gethostname()}" if self.node_count > 1 else ""
            monitor.start()
        return monitor

    def _agree_on_survivors(self) -> ReopenError | ReportedError | None:
        """
        Agree with the other live ranks on who continues after a loss.

        Return the error to raise: ReopenError on continuing ranks, ReportedError on others; None to end the run.
        """
        end, monitor = time.monotonic() + self.timeout, self._monitor
        try:
            members = agree_on_survivors(
                monitor.store,
                self.rank,
                self.replicas,
                is_valid_replica_count=lambda count: all(limit.fits_replicas(count) for limit in self.limits.values()),
                get_lost_ranks=lambda: monitor.lost_ranks,
                is_over=lambda: monitor.failure is not None or monitor.is_lost or time.monotonic() > end,
            )
        except RuntimeError:  # the store was in a lost process
            return None
        if not members:
            return None
        losses = monitor.describe_lost_ranks()
        if self.rank not in members:
            text = f"rank {self.rank} ends, because its replica is incomplete or not needed: {losses}"
            log.warning("%s", text)
            return ReportedError(text)
        text = f"{losses}; {len(members)} of {self.world_size} processes continue"
        log.warning("%s", text, extra={PRINTED: True})
        if self.rank == members[0]:
            print_text(text, "stderr")
        self._survivors = Survivors(members, f"{self._name}/survivors")
        self._survivors.set_rank_variables(self.rank)
        return ReopenError(f"{text} if `drawloom run` started them")

    def _join_process_group(self) -> None:
        """Make torch's default process group, after a loss with the continuing ranks only."""
        bound = self.device.device if self.device.backend == "nccl" else None
        meeting = {}
        if self._survivors is not None:
            store = connect_to_launch_store(
                self._launch.address, self._launch.port, self._survivors.meeting, self.timeout
            )
            meeting = {"store": store, "rank": self.rank, "world_size": self.world_size}
        try:
            with self._connections.record_sockets():
                dist.init_process_group(self.device.backend, timeout=self._limit, device_id=bound, **meeting)
        except RuntimeError as error:  # torch's errors of the network and the store are subclasses
            raise UserError(
                f"rank {self.rank} did not reach all {self.world_size} ranks within {self.timeout:g} s; is "
                f"MASTER_ADDR the same on all, and reachable? torch says: {str(error).strip().splitlines()[0]}"
            ) from error
        self._joined = True

    @property
    def _tensor_device(self) -> torch.device:
        """The device whose tensors the backend accepts."""
        return self.device.device if self.device.backend == "nccl" else torch.device("cpu")

    def _make_torch_group(self, name: str, own_ranks: Sequence[int], rank_sets: Sequence[Sequence[int]]) -> Any:
        """Make torch's process group for the set with this rank, and return it; None if the set is this rank alone."""
        if len(own_ranks) == self.world_size:
            return dist.group.WORLD
        if self.device.backend == "nccl":
            # one split makes all groups; new_group would split the world's communicator once for each set
            return dist.split_group(
                split_ranks=[list(ranks) for ranks in rank_sets], timeout=self._limit, group_desc=name
            )
        if len(own_ranks) == 1:
            return None
        # without local synchronization, every rank would have to make every group
        with self._connections.record_sockets():
            return dist.new_group(list(own_ranks), timeout=self._limit, use_local_synchronization=True)

    def _get_communicator(self, name: str, sender: int, receiver: int) -> TorchCommunicator:
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
        with convert_peer_errors(self._monitor, "a connection", name, ranks), self._connections.record_sockets():
            backend = self._connect_torch_backend(name, ranks)
        communicator = TorchCommunicator(name, ranks, backend, self._tensor_device, self._monitor)
        # the first transfer connects the two ranks, so it happens here, where all ranks follow one order
        probe = torch.zeros(1, device=self._tensor_device)
        (communicator.send(probe) if self.rank == ranks[0] else communicator.receive(probe)).wait()
        return communicator

    def _connect_torch_backend(self, name: str, ranks: tuple[int, int]) -> Any:
        """
        Return a connected communicator for two ranks outside torch's group registry.

        dist.new_group is collective over all ranks, and with a bound device it shares one NCCL communicator among all
        point-to-point operations in a group.
        """
        store, rank = PrefixStore(name, self._store), ranks.index(self.rank)
        if self.device.backend == "gloo":
            return dist.ProcessGroupGloo(store, rank, 2, self._limit)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._limit
        options.global_ranks_in_group = list(ranks)
        with _suppress_serialization_warning():
            backend = dist.ProcessGroupNCCL(store, rank, 2, options)
        backend.eager_connect_single_device(self._tensor_device)
        return backend

    def _close_communicators(self) -> None:
        """Shut down all point-to-point communicators."""
        communicators, self._communicators = self._communicators, {}
        # destroy_process_group does not know these backends; gloo's backends close when they are freed
        for communicator in communicators.values() if self.device.backend == "nccl" else ():
            communicator.backend.shutdown()


def _print_unreported_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught error as `sys.excepthook` does, unless it was already reported."""
    if not isinstance(error, ReportedError):
        sys.__excepthook__(kind, error, trace)


@contextmanager
def _suppress_serialization_warning() -> Iterator[None]:
    """Suppress NCCL's warning that these backends' operations run one after another, as intended here."""
    name = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
