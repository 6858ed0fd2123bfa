"""The processes that torchrun started, or this one alone; it owns torch's default process group."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist

from drawloom.components.distributed.groups import OneRank, ProcessGroup
from drawloom.components.distributed.launch import Launch, read_launch
from drawloom.components.ports.distributed import Device, Group
from drawloom.graph import UserError, above, component, setting

FOR_EVER = timedelta(days=30)


@component(change="free")
class TorchProcesses:
    """The processes of torchrun's variables, or a single process where there are none."""

    device: Device
    timeout: float = setting(default=600.0, check=above(0), doc="seconds that a process waits for the others")

    _launch: Launch = attrs.field(init=False, factory=Launch)
    _joined: bool = attrs.field(init=False, default=False)
    _limit: timedelta = attrs.field(init=False)
    _handles: list[Any] = attrs.field(init=False, factory=list)

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
        self._limit = timedelta(seconds=self.timeout)
        if dist.is_initialized():
            raise UserError(
                "torch has a default process group already, and this run would change it; call "
                "torch.distributed.destroy_process_group() first"
            )
        if not self._launch.alone:
            self._join()

    def close(self) -> None:
        """Leave the other processes; torch is as it was."""
        if self._joined:
            self._joined = False
            self._handles = []
            dist.destroy_process_group()

    def group(self, name: str, sets: Sequence[Sequence[int]]) -> Group:
        """A group for each of these sets of ranks, disjoint and with all ranks; gives the one of this process."""
        groups = [(self.rank in ranks, self._make(name, ranks)) for ranks in sets]
        return next(group for own, group in groups if own)

    def apart(self, name: str) -> Group:
        """All processes, on CPUs and by a channel of their own, where they wait for one another as long as they live."""
        if not self._joined:
            return OneRank()
        ranks = list(range(self.world_size))
        return ProcessGroup(name, ranks, dist.new_group(ranks, backend="gloo", timeout=FOR_EVER), torch.device("cpu"))

    def set_timeout(self, seconds: float) -> None:
        """From now on a process waits this long for the others in any group, also in groups that are made later."""
        self._limit = timedelta(seconds=seconds)
        for handle in [dist.group.WORLD, *self._handles] if self._joined else []:
            dist.distributed_c10d._set_pg_timeout(self._limit, handle)

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

    def _make(self, name: str, ranks: Sequence[int]) -> Group:
        if len(ranks) == 1:
            return OneRank()
        handle: Any = dist.group.WORLD
        if len(ranks) < self.world_size:
            handle = dist.new_group(list(ranks), timeout=self._limit)
            self._handles += [handle] if self.rank in ranks else []
        where = self.device.device if self.device.backend == "nccl" else torch.device("cpu")
        return ProcessGroup(name, ranks, handle, where)
