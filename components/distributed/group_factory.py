"""
Maker of torch's process groups and point-to-point communicators for this process.

A communicator carries only one direction: NCCL runs a communicator's operations one after another on one stream, so in
a shared communicator a send would wait for a receive, or either for a collective.
"""

import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from ctypes import py_object, pythonapi
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from drawloom import UserError, internal
from drawloom.components.distributed.connections import (
    LOST,
    STUCK_AFTER,
    Connections,
    run_gloo_collectives_in_one_thread,
)
from drawloom.components.distributed.p2p_links import Edge
from drawloom.components.distributed.process_group import (
    TorchGroup,
    call_directly,
    mark_blocked_and_convert_errors,
    read_first_line,
)
from drawloom.components.distributed.rank_monitor import RankMonitor
from drawloom.components.distributed.single_process import SingleProcess
from drawloom.ports import Device, Group, P2PChannel, Pending

log = logging.getLogger("drawloom.distributed")

NO_TIMEOUT = timedelta(days=30)  # torch has no unlimited timeout
# Timeout for ranks that have met to connect by gloo. After a loss, an abandoned thread waits five times as long
# (measured: 15.0 s for 3 s, torch 2.13).
CONNECT_LIMIT = timedelta(seconds=30)
MEETING_TICK = 0.002  # seconds between two looks for other ranks
CONTROL = "control "  # begins the names of groups over gloo, whatever the backend
ABORT_LIMIT = 10.0  # seconds for NCCL to abort communicators
NCCL_MARGIN = timedelta(seconds=30)  # on top of ours, before torch's NCCL watchdog kills the process


@attrs.define(eq=False)
class P2PWork:
    """A send or receive in progress; it keeps its tensor alive until it is completed."""

    communicator: "TorchCommunicator"
    _work: Any
    _tensor: Tensor | None

    def is_completed(self) -> bool:
        """Return whether the tensor has been sent or received (on a GPU: by the device)."""
        return self._work is None or bool(self._work.is_completed())

    def wait(self) -> None:
        if self._work is not None:
            with self.communicator.mark_blocked_and_convert_errors():
                self._work.wait()
            self._work = self._tensor = None  # torch's Work keeps its tensors alive after completion


@attrs.frozen(eq=False)
class TorchCommunicator:
    """One end of a one-way communicator from `ranks[0]` to `ranks[1]`, over a torch backend (gloo or NCCL)."""

    name: str
    ranks: Edge
    backend: Any
    device: torch.device
    monitor: RankMonitor

    def send(self, tensor: Tensor) -> P2PWork:
        """Start to send a contiguous tensor (any shape and dtype)."""
        with self.mark_blocked_and_convert_errors():
            return P2PWork(self, self.backend.send([tensor], 1, 0), tensor)

    def receive(self, tensor: Tensor) -> P2PWork:
        """Start to receive into a contiguous tensor (any shape and dtype)."""
        with self.mark_blocked_and_convert_errors():
            return P2PWork(self, self.backend.recv([tensor], 0, 0), tensor)

    def mark_blocked_and_convert_errors(self) -> AbstractContextManager[None]:
        """Mark this rank as blocked in this communicator's transfer, and convert torch's errors to a UserError."""
        return mark_blocked_and_convert_errors(self.monitor, "a point-to-point transfer", self.name, self.ranks)


@attrs.frozen
class TorchP2PChannel:
    """The two communicators between this rank and a peer, one per direction."""

    outgoing: TorchCommunicator
    incoming: TorchCommunicator

    def send(self, tensor: Tensor) -> Pending:
        return self.outgoing.send(tensor)

    def receive(self, tensor: Tensor) -> Pending:
        return self.incoming.receive(tensor)


def connect_two_ranks_by_nccl(store: Any, rank: int, ranks: Edge, timeout: timedelta, device: torch.device) -> Any:
    """
    Return an NCCL communicator for two ranks outside torch's group registry, in which this one is `rank`, 0 or 1.

    dist.new_group is collective over all ranks, and with a bound device it shares one NCCL communicator among all
    point-to-point operations in a group.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    options.global_ranks_in_group = list(ranks)
    with _suppress_serialization_warning():
        backend = dist.ProcessGroupNCCL(store, rank, 2, options)
    backend.eager_connect_single_device(device)
    return backend


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


@attrs.define(eq=False)
class GroupFactory:
    """
    Maker of groups for rank `rank`; it makes each once, and owns torch's default group from `join` to `close`.

    `timeout` is in seconds. `store` is shared by the ranks (None until the first generation's monitor runs). With
    `survives_rank_losses`, all ranks meet in the store before they connect.
    """

    device: Device
    rank: int = 0
    world_size: int = 1
    timeout: float = 600.0
    survives_rank_losses: bool = False
    connections: Connections = attrs.field(factory=Connections)
    monitor: RankMonitor = attrs.field(factory=RankMonitor)
    store: Any = None
    is_joined: bool = internal(False)

    # torch's process groups by the sets of ranks for which they were made
    _handles: dict[tuple[tuple[int, ...], ...], Any] = internal(factory=dict)
    _control_handles: list[Any] = internal(factory=list)
    _communicators: dict[str, TorchCommunicator] = internal(factory=dict)
    _patches: ExitStack = internal(factory=ExitStack)
    _meetings: Counter[str] = internal(factory=Counter)

    def join(self, store: Any = None) -> None:
        """Make torch's default process group over a store; None: torch connects to the store in its variables."""
        bound = self.device.device if self._uses_nccl else None
        arguments: Mapping[str, Any] = {}
        hook = sys.excepthook
        try:
            with self._wait_for_ranks_and_record_connections("world", range(self.world_size), self._limit) as timeout:
                if store is not None:
                    world = PrefixStore("world", store)
                    arguments = {"store": world, "rank": self.rank, "world_size": self.world_size}
                dist.init_process_group(self.device.backend, timeout=timeout, device_id=bound, **arguments)
            _set_group_timeout(dist.group.WORLD, self._limit)
        except RuntimeError as error:  # torch's errors of the network and the store are subclasses
            dist.distributed_c10d._world.group_count = 0  # torch numbers groups, and their names must agree later
            self.monitor.is_recovering = True
            raise UserError(
                f"rank {self.rank} did not reach all {self.world_size} ranks within {self.timeout:g} s; is "
                f"MASTER_ADDR the same on all, and reachable? torch says: {read_first_line(error)}"
            ) from error
        finally:
            sys.excepthook = hook  # torch adds a prefix to it in each process group
        self.is_joined = True
        if self.survives_rank_losses and self._uses_nccl:
            self.connections.abort_communicators = self._abort_communicators
        elif self.survives_rank_losses:
            self._patches.enter_context(self.connections.make_waits_interruptible())

    @property
    def _uses_nccl(self) -> bool:
        return self.device.backend == "nccl"

    @property
    def _limit(self) -> timedelta:
        """torch's timeout: `timeout`, and with NCCL a margin, because our own diagnosis must come first."""
        # With NCCL no host thread waits, and torch's watchdog kills a process whose device waits too long. The margin
        # lets the timeouts listener end the run first, with a diagnosis.
        limit = timedelta(seconds=self.timeout)
        return limit + NCCL_MARGIN if self._uses_nccl else limit

    @property
    def tensor_device(self) -> torch.device:
        """The device whose tensors the backend accepts."""
        return self.device.device if self._uses_nccl else torch.device("cpu")

    def make_group(self, name: str, rank_sets: Sequence[Sequence[int]]) -> Group:
        """Make one process group per set of ranks, and return this process's (`Processes.make_group`)."""
        own = next(ranks for ranks in rank_sets if self.rank in ranks)
        if len(own) == 1 and all(len(ranks) == 1 for ranks in rank_sets):
            return SingleProcess()
        key = tuple(map(tuple, rank_sets))
        if key not in self._handles:
            self._handles[key] = self._make_torch_group(name, own, rank_sets)
        if len(own) == 1:
            return SingleProcess()
        return TorchGroup(name, own, self._handles[key], self.tensor_device, self.monitor)

    def open_channel(self, name: str, first: int, second: int) -> P2PChannel:
        """Return the named channel between this rank and another (`Processes.open_channel`)."""
        up, down = (
            self._get_or_connect_communicator(name, first, second),
            self._get_or_connect_communicator(name, second, first),
        )
        return TorchP2PChannel(up, down) if self.rank == first else TorchP2PChannel(down, up)

    def make_control_group(self, name: str) -> Group:
        """Make a CPU group of all ranks without a timeout (`Processes.make_control_group`)."""
        if not self.is_joined:
            return SingleProcess()
        ranks = list(range(self.world_size))
        with self._wait_for_ranks_and_record_connections(f"{CONTROL}{name}", ranks, NO_TIMEOUT) as timeout:
            handle = dist.new_group(ranks, backend="gloo", timeout=timeout)
        _set_group_timeout(handle, NO_TIMEOUT)
        self._control_handles.append(handle)
        call = self._call_until_broken if self.survives_rank_losses and self._uses_nccl else call_directly
        return TorchGroup(name, ranks, handle, torch.device("cpu"), self.monitor, call)

    def set_timeout(self, seconds: float) -> None:
        """Set the timeout of existing and future groups and channels."""
        self.timeout = seconds
        for handle in dict.fromkeys(
            [dist.group.WORLD, *filter(None, self._handles.values())] if self.is_joined else []
        ):
            _set_group_timeout(handle, self._limit)
        for communicator in self._communicators.values():
            communicator.backend._set_default_timeout(self._limit)

    def close(self) -> None:
        """Shut down all communicators, and destroy the groups."""
        if not self.is_joined:
            return
        self._patches.close()
        self.connections.end_helper_threads()
        if self.connections.has_stuck_operations:
            self._keep_groups_for_good()
        self.is_joined, self._handles, self._control_handles = False, {}, []
        communicators, self._communicators = self._communicators, {}
        if self._uses_nccl and self.connections.is_broken:
            if not self.connections.wait_until_aborted(ABORT_LIMIT):
                log.warning("NCCL has not aborted its communicators within %g s; waiting for it", ABORT_LIMIT)
            dist.distributed_c10d._abort_process_group()  # destroy_process_group would wait for the groups
            return
        # destroy_process_group does not know these backends; gloo's backends close when they are freed
        for communicator in communicators.values() if self._uses_nccl else ():
            communicator.backend.shutdown()
        dist.destroy_process_group()

    def _abort_communicators(self) -> None:
        """Abort all NCCL communicators at once: one by one, they could wait for one another (pytorch#119797)."""
        groups = dict.fromkeys(filter(None, [dist.group.WORLD, *self._handles.values()]))
        backends: list[Any] = [group._get_backend(self.device.device) for group in groups]
        backends += [communicator.backend for communicator in self._communicators.values()]
        threads = [threading.Thread(target=backend.abort, name="abort", daemon=True) for backend in backends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _call_until_broken(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a blocking gloo function, which may get stuck after a loss."""
        return self.connections.call_until_broken(lambda: function(*arguments, **named), STUCK_AFTER)

    def _keep_groups_for_good(self) -> None:
        """Never free gloo's groups: it would wait for their operations, also at the process's end."""
        groups = [*self._control_handles]
        if not self._uses_nccl:
            backends = [communicator.backend for communicator in self._communicators.values()]
            groups += [dist.group.WORLD, *self._handles.values(), *backends]
        for group in groups:
            pythonapi.Py_IncRef(py_object(group))

    @contextmanager
    def _wait_for_ranks_and_record_connections(
        self, name: str, ranks: Sequence[int], limit: timedelta
    ) -> Iterator[timedelta]:
        """
        Record the connections made in the body, in which `ranks` make a group, and return the body's timeout.

        If the run survives losses, wait for the ranks beforehand, which may be lost or late. A loss ends this wait, and
        the body's, with a RuntimeError.
        """
        if not self.survives_rank_losses or self.store is None:
            with self.connections.record_sockets(keep=not self._uses_nccl), run_gloo_collectives_in_one_thread():
                yield limit
            return
        self._meetings[name] += 1
        key = f"met/{name}/{self._meetings[name]}"
        self.store.set(f"{key}/{self.rank}", b"1")
        end = time.monotonic() + self.timeout
        with self.monitor.mark_blocked("the making", name):
            while not (self.connections.is_broken or self.store.check([f"{key}/{rank}" for rank in ranks])):
                if time.monotonic() > end:
                    raise RuntimeError(f"not all ranks came to make group {name} within {self.timeout:g} s")
                time.sleep(MEETING_TICK)
            is_gloo = not self._uses_nccl or name.startswith(CONTROL)
            with (
                self.connections.record_sockets(keep=is_gloo),
                run_gloo_collectives_in_one_thread(),
                self.connections.make_gloo_connecting_interruptible(),
            ):
                yield min(limit, CONNECT_LIMIT) if is_gloo else limit
            if self.connections.is_broken:
                raise RuntimeError(LOST)  # the abort may have missed the group

    def _make_torch_group(self, name: str, own_ranks: Sequence[int], rank_sets: Sequence[Sequence[int]]) -> Any:
        """Make torch's process group for the set with this rank, and return it; None if the set is this rank alone."""
        if len(own_ranks) == self.world_size:
            return dist.group.WORLD
        if self._uses_nccl:
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
            self._connect_ranks(key, (sender, receiver))
        return self._communicators[key]

    def _connect_ranks(self, name: str, ranks: tuple[int, int]) -> None:
        """Connect a one-way communicator by one transfer between its two ranks."""
        if self.tensor_device.type != self.device.device.type:
            text = f"ranks on {self.device.device.type} can't send tensors to one another over"
            raise UserError(f"{text} {self.device.backend!r}; write backend = 'nccl' in [device]", exit_code=2)
        with (
            mark_blocked_and_convert_errors(self.monitor, "a connection", name, ranks),
            self._wait_for_ranks_and_record_connections(name, ranks, self._limit) as timeout,
        ):
            store, rank = PrefixStore(name, self.store), ranks.index(self.rank)
            if self.device.backend == "gloo":
                module: Any = dist.distributed_c10d  # the context above replaces its class
                backend = module.ProcessGroupGloo(store, rank, 2, timeout)
            else:
                backend = connect_two_ranks_by_nccl(store, rank, ranks, timeout, self.tensor_device)
        backend._set_default_timeout(self._limit)
        communicator = TorchCommunicator(name, ranks, backend, self.tensor_device, self.monitor)
        self._communicators[name] = communicator  # before the transfer: a loss must abort it
        if self.connections.is_broken:
            raise RuntimeError(LOST)
        # the first transfer connects the two ranks, so it happens here, where all ranks follow one order
        probe = torch.zeros(1, device=self.tensor_device)
        (communicator.send(probe) if self.rank == ranks[0] else communicator.receive(probe)).wait()


def _set_group_timeout(group: Any, timeout: timedelta) -> None:
    """Set a process group's timeout."""
    # torch 2.14 has a public function, and warns of the private one.
    set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
    set_timeout(timeout, group)
