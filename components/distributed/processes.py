"""The processes in a torchrun launch, or a single process; owns torch's default process group."""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import attrs
import torch.distributed as dist

from drawloom import Every, UserError, above, component, internal, setting
from drawloom.ports import PRINTED, Device, Group, P2PChannel, ReplicaLimit

if TYPE_CHECKING:
    from drawloom.components.distributed.launched_ranks import LaunchedRanks
    from drawloom.components.distributed.membership import Membership
    from drawloom.components.distributed.torchrun import Launch

log = logging.getLogger("drawloom.distributed")


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
        "seconds until a collective that waits for other ranks fails", default=600.0, check=above(0)
    )
    _on_failure: Literal["stop", "continue"] = setting(
        "after the loss of a process: end the run, or continue it with the processes that are left",
        default="stop",
        alias="on_failure",
    )
    heartbeat_timeout: float = setting(
        "seconds without a heartbeat after which a process counts as lost, with on_failure = 'continue'",
        default=15.0,
        check=above(0),
    )

    _ranks: "LaunchedRanks | None" = internal(None)  # None: a process without a launch
    # for `open`: a membership in the next generation, or "spare" for a process without one
    _next: "Membership | Literal['spare'] | None" = internal(None)

    @property
    def _launch(self) -> "Launch":
        from drawloom.components.distributed.torchrun import Launch

        return self._ranks.launch if self._ranks else Launch()

    @property
    def rank(self) -> int:
        return self._launch.rank

    @property
    def world_size(self) -> int:
        return self._launch.world_size

    @property
    def node_rank(self) -> int:
        return self._launch.node_rank

    @property
    def node_count(self) -> int:
        return self._launch.node_count

    def open(self) -> None:
        """Join the process group, if there are other processes. Raises UserError if they do not join in time."""
        if dist.is_initialized():
            raise UserError(
                "torch has a default process group already, and this run would change it; call "
                "torch.distributed.destroy_process_group() first"
            )
        from drawloom.components.distributed.torchrun import Launch, read_launch

        launch = read_launch()
        if launch != Launch():
            # imported here: a process without a launch needs neither groups nor what watches and survives other ranks
            from drawloom.components.distributed.launched_ranks import LaunchedRanks

            heartbeat_timeout = self.heartbeat_timeout if self.survives_rank_losses else None
            self._ranks = LaunchedRanks(launch, self.device, self.limits, self.timeout, heartbeat_timeout, self._next)
            self._ranks.open()

    def close(self) -> None:
        """Destroy the process group and stop the monitor."""
        if self._ranks is not None:
            self._ranks.close()

    @property
    def survives_rank_losses(self) -> bool:
        return self._on_failure == "continue"

    @property
    def generation(self) -> int:
        return self._ranks.generation.number if self._ranks and self._ranks.generation else 0

    @property
    def remaining_shards(self) -> int | None:
        return self._ranks.generation.shards if self._ranks and self._ranks.generation else None

    def set_replica_shape(self, stages: int, shards: int, shard_size: int, expert: int) -> None:
        if self._ranks is not None:
            self._ranks.set_replica_shape(stages, shards, shard_size, expert)

    def can_grow_with_spares(self, state_bytes: int) -> bool:
        return self._ranks is not None and self._ranks.can_grow_with_spares(state_bytes)

    def hand_over(self) -> "Membership | Literal['spare'] | None":
        """Return the membership in the next generation, for the reopened node; "spare" for a process without one."""
        return self._ranks.next if self._ranks else None

    def take_over(self, values: "Membership | Literal['spare'] | None") -> None:
        """Keep the membership; `open` joins its generation instead of all ranks."""
        self._next = values

    def on_failure(self, error: BaseException) -> BaseException | None:
        """
        Report this rank's failure, which ends all ranks, and return a ReportedError if there are several ranks.

        If the run survives a loss, or lets spares join, return a ReopenError instead.
        """
        if not isinstance(error, Exception):
            return None
        if self._ranks is not None and (replacement := self._ranks.report_failure(error)):
            return replacement
        if not isinstance(error, UserError) and log.hasHandlers():
            # Python prints the traceback on the terminal
            log.error("%s", error, exc_info=error, extra={PRINTED: True})
        return None

    def make_group(self, name: str, rank_sets: Sequence[Sequence[int]]) -> Group:
        return self._ranks.groups.make_group(name, rank_sets) if self._ranks else _create_single_group()

    def open_channel(self, name: str, first: int, second: int) -> P2PChannel:
        assert self._ranks is not None
        return self._ranks.groups.open_channel(name, first, second)

    def make_control_group(self, name: str) -> Group:
        return self._ranks.groups.make_control_group(name) if self._ranks else _create_single_group()

    def set_timeout(self, seconds: float) -> None:
        if self._ranks is not None:
            self._ranks.groups.set_timeout(seconds)

    def record_step_and_phase(self, location: str) -> None:
        if self._ranks is not None:
            self._ranks.monitor.location = location

    def diagnose_hang(self) -> str:
        return self._ranks.monitor.describe_ranks_to_blame() if self._ranks else ""

    def fail_ranks_and_must_exit(self, text: str) -> bool:
        if self._ranks is None or self._ranks.monitor.store is None:
            log.error("%s", text)
            return True
        return self._ranks.fail_ranks_and_must_exit(text)


def _create_single_group() -> Group:
    """Return the group of one process."""
    from drawloom.components.distributed.single_process import SingleProcess

    return SingleProcess()
