"""The processes that torchrun started, or this one alone; it owns torch's default process group."""

import logging
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from drawloom.components.distributed.failure_monitor import Alarm, connect
from drawloom.components.distributed.hang_diagnosis import HangMonitor
from drawloom.components.distributed.machine import machine
from drawloom.components.distributed.p2p_links import TorchCommunicator
from drawloom.components.distributed.parent import watch_parent
from drawloom.components.distributed.process_group import SingleProcess, TorchGroup, peer_errors
from drawloom.components.distributed.torchrun import Launch, read_launch
from drawloom.components.ports.distributed import Communicator, Device, Group
from drawloom.graph import UserError, above, component, setting

log = logging.getLogger("drawloom.distributed")

FOR_EVER = timedelta(days=30)
LAST_RESORT = timedelta(seconds=30)


@component(impact="safe")
class TorchProcesses:
    """The processes of torchrun's variables, or a single process where there are none."""

    device: Device
    timeout: float = setting(default=600.0, check=above(0), doc="seconds that a process waits for the others")

    _launch: Launch = attrs.field(init=False, factory=Launch)
    _joined: bool = attrs.field(init=False, default=False)
    _limit: timedelta = attrs.field(init=False)
    _handles: list[Any] = attrs.field(init=False, factory=list)
    _communicators: dict[str, TorchCommunicator] = attrs.field(init=False, factory=dict)
    _store: Any = attrs.field(init=False, default=None)
    _alarm: Alarm | None = attrs.field(init=False, default=None)
    _monitor: HangMonitor = attrs.field(init=False, factory=lambda: HangMonitor(0, 1))

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self._launch.rank

    @property
    def world_size(self) -> int:
        """How many processes there are."""
        return self._launch.world_size

    @property
    def local_rank(self) -> int:
        """This process's number on its machine, from 0."""
        return self._launch.local_rank

    @property
    def local_world_size(self) -> int:
        """How many of the processes run on this machine."""
        return self._launch.local_world_size

    def open(self) -> None:
        """Find the other processes, if there are any; a UserError if they don't come."""
        self._launch = read_launch()
        if self._launch.address:
            watch_parent(os.getppid())
        self._limit = self._wait_of(self.timeout)
        if dist.is_initialized():
            raise UserError(
                "torch has a default process group already, and this run would change it; call "
                "torch.distributed.destroy_process_group() first"
            )
        if not self._launch.alone:
            self._join()
        self._monitor = self._start_monitor()

    def close(self) -> None:
        """Leave the other processes; torch is as it was."""
        if self._alarm is not None:
            self._alarm.leave()
        if self._joined:
            self._joined = False
            self._handles = []
            self._close_communicators()
            dist.destroy_process_group()
        self._monitor.stop()  # not before: after a failure it ends a process that does not come out of what is above
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None

    def on_failure(self, error: BaseException) -> BaseException | None:
        """End all ranks when this one fails; what is told of it is told here, where the first of them fails."""
        if not isinstance(error, Exception):
            return None
        if self._alarm is not None:
            return SystemExit(self._alarm.ring_for(error, self._monitor.place).exit_code)
        if not isinstance(error, UserError) and log.hasHandlers():
            log.error("%s", error, exc_info=error, extra={"told": True})  # the terminal gets it from Python itself
        return None

    def group(self, name: str, sets: Sequence[Sequence[int]]) -> Group:
        """A group for each of these sets of ranks, disjoint and with all ranks; gives the one of this process."""
        groups = [(self.rank in ranks, self._make(name, ranks)) for ranks in sets]
        return next(group for own, group in groups if own)

    def communicator(self, name: str, sender: int, receiver: int) -> Communicator:
        """
        The one-way communicator of this name between two ranks, of which this is one; connected when first asked for.

        Both ranks ask; where ranks ask for several, all follow one order (see p2p_links).
        """
        key = f"{name} {sender}->{receiver}"
        if key not in self._communicators:
            self._communicators[key] = self._connect(key, (sender, receiver))
        return self._communicators[key]

    def control_group(self, name: str) -> Group:
        """All processes, on CPUs, by a group of their own where they wait for one another as long as they live."""
        if not self._joined:
            return SingleProcess()
        ranks = list(range(self.world_size))
        handle = dist.new_group(ranks, backend="gloo", timeout=FOR_EVER)
        return TorchGroup(name, ranks, handle, torch.device("cpu"), self._monitor.beside())

    def set_timeout(self, seconds: float) -> None:
        """From now on a process waits this long for the others in any group, also in groups that are made later."""
        self._limit = self._wait_of(seconds)
        for handle in [dist.group.WORLD, *self._handles] if self._joined else []:
            dist.distributed_c10d._set_pg_timeout(self._limit, handle)
        for communicator in self._communicators.values():
            communicator.backend._set_default_timeout(self._limit)

    def set_location(self, place: str) -> None:
        """Where this process is, for the others to be told if it keeps them waiting."""
        self._monitor.place = place

    def diagnose(self) -> str:
        """Who keeps the others waiting, in words, as far as it can be known; empty if it can't. It takes a second."""
        return self._monitor.diagnose()

    def fail(self, text: str) -> None:
        """Tell why this rank ends, unless another one was first, and let all others end."""
        if self._alarm is not None:
            self._alarm.ring(text)
        else:
            log.error("%s", text)

    def _wait_of(self, seconds: float) -> timedelta:
        """
        How long groups wait. With NCCL no host waits, and torch ends a process whose device waits for too long without
        a word of ours: whoever watches the run is given time to do better.
        """
        limit = timedelta(seconds=seconds)
        return limit + LAST_RESORT if self.device.backend == "nccl" else limit

    def _start_monitor(self) -> HangMonitor:
        """A roll of this start of the processes; a process that is alone has nobody to look at."""
        launch = self._launch
        roll = HangMonitor(self.rank, self.world_size)
        if self._joined:
            world = TorchGroup("world", range(self.world_size), dist.group.WORLD, self._where, roll)
            here = machine() if hasattr(os, "pidfd_open") else ""
            every = world.gather_json([secrets.token_hex(8), here, os.getpid()])
            name = every[0][0]  # stores may outlive a start, and processes may start twice
            peers = {rank: process for rank, (_, where, process) in enumerate(every) if where == every[self.rank][1]}
            roll.store = connect(launch.address, launch.port, name, self.timeout)
            self._store = connect(launch.address, launch.port, f"{name}/p2p", self.timeout)
            del peers[self.rank]
            self._alarm = roll.alarm = Alarm(self.rank, roll.store, peers, launch.error_file)
            self._alarm.open()
            roll.start()
        return roll

    def _join(self) -> None:
        bound = self.device.device if self.device.backend == "nccl" else None
        try:
            dist.init_process_group(self.device.backend, timeout=self._limit, device_id=bound)
        except RuntimeError as error:  # torch's own errors of the network and the store are RuntimeErrors too
            raise UserError(
                f"process {self.rank} did not find the other {self.world_size - 1} within {self.timeout:g} s; is "
                f"MASTER_ADDR the same on all, and reachable? torch says: {str(error).strip().splitlines()[0]}"
            ) from error
        self._joined = True

    @property
    def _where(self) -> torch.device:
        """Where the backend wants tensors."""
        return self.device.device if self.device.backend == "nccl" else torch.device("cpu")

    def _make(self, name: str, ranks: Sequence[int]) -> Group:
        if len(ranks) == 1:
            return SingleProcess()
        handle: Any = dist.group.WORLD
        if len(ranks) < self.world_size:
            handle = dist.new_group(list(ranks), timeout=self._limit)
            self._handles += [handle] if self.rank in ranks else []
        return TorchGroup(name, ranks, handle, self._where, self._monitor)

    def _connect(self, name: str, ranks: tuple[int, int]) -> TorchCommunicator:
        if self._where.type != self.device.device.type:
            text = f"ranks on {self.device.device.type} can't send tensors to one another over"
            raise UserError(f"{text} {self.device.backend!r}; write backend = 'nccl' in [device]", exit_code=2)
        with peer_errors(self._monitor, "a connection", name, ranks):
            backend = self._backend(name, ranks)
        communicator = TorchCommunicator(name, ranks, backend, self._where, self._monitor)
        probe = torch.zeros(1, device=self._where)
        (communicator.send(probe) if self.rank == ranks[0] else communicator.receive(probe)).wait()
        return communicator

    def _backend(self, name: str, ranks: tuple[int, int]) -> Any:
        """
        A connected communicator of two that torch's registry of groups knows nothing of.

        dist.new_group would make all ranks of the run take part, and with a bound device share one NCCL communicator
        among all point-to-point operations of a group.
        """
        store, rank = PrefixStore(name, self._store), ranks.index(self.rank)
        if self.device.backend == "gloo":
            return dist.ProcessGroupGloo(store, rank, 2, self._limit)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._limit
        options.global_ranks_in_group = list(ranks)
        with _without_serialization_warning():
            backend = dist.ProcessGroupNCCL(store, rank, 2, options)
        backend.eager_connect_single_device(self._where)
        return backend

    def _close_communicators(self) -> None:
        communicators, self._communicators = self._communicators, {}
        for communicator in communicators.values() if self.device.backend == "nccl" else ():
            communicator.backend.shutdown()


@contextmanager
def _without_serialization_warning() -> Iterator[None]:
    """NCCL backends made here don't warn that their operations run one after another, which is what they are for."""
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
