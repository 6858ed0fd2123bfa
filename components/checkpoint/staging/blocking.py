"""Blocking staging: training waits while the state is copied."""

from typing import TYPE_CHECKING, ClassVar

import torch

from drawloom import component, internal, setting
from drawloom.ports import NodeState

if TYPE_CHECKING:
    from drawloom.components.checkpoint.staging.copy_plan import Pool


@component(impact="safe")
class Blocking:
    """Stager with copies to CPU memory before training continues; training does not wait for the disk."""

    # torch's async_save reads both names
    should_synchronize_after_execute: ClassVar[bool] = False
    _synchronize_after_execute: ClassVar[bool] = False
    makes_copies: ClassVar[bool] = True

    keep: bool = setting("reuse a copy's memory for the next copy, which is several times faster", default=True)

    _pool: "Pool | None" = internal(None)

    @torch.no_grad()
    def stage(self, state_dict: NodeState) -> NodeState:
        """Return a CPU copy of the state. Its memory is reused after the last copied tensor is freed."""
        from drawloom.components.checkpoint.staging.copy_plan import KEPT, Pool, plan_copies

        if self._pool is None:
            self._pool = Pool(kept=KEPT if self.keep else 0, pinned=torch.cuda.is_available())
        staged, copies = plan_copies(state_dict, self._pool)
        for copy in copies:
            copy.copy_tensor(non_blocking=True)
        for device in {copy.source.device for copy in copies if copy.source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        return staged

    def synchronize_staging(self) -> None:
        """Do nothing, because the copy is complete when `stage` returns."""

    def close(self) -> None:
        """Free the copies' memory; for copies in use, as soon as they are freed."""
        if self._pool is not None:
            self._pool.free_and_stop_pooling()
            self._pool = None
