"""Overlapped staging: the state is copied during the next step's forward and backward passes."""

import time
from concurrent.futures import Future
from typing import Any, ClassVar

import attrs
import torch

from drawloom import component, internal, setting
from drawloom.components.checkpoint.staging.copy_plan import KEPT, Copy, Pool, plan_copies
from drawloom.components.distributed.threads import submit_in_new_thread
from drawloom.ports import NodeState

SMALL = 2**16  # bytes; smaller CPU tensors are copied at once, because counters change before the weights do


@attrs.frozen
class PendingCopy:
    """Copy in progress: its future, and the CUDA events for its copies from GPUs."""

    future: Future[dict[str, Any]]
    events: list[torch.cuda.Event]
    on_cpu: bool


@component(impact="safe")
class Overlapped:
    """
    Stager with copies during training; the next optimizer step waits for the copy, not for the disk.

    A separate stream copies GPU tensors, and a thread copies CPU tensors. CPU tensors up to 64 KiB are copied
    before `stage` returns.
    """

    # torch's async_save reads both names
    should_synchronize_after_execute: ClassVar[bool] = True
    _synchronize_after_execute: ClassVar[bool] = True
    makes_copies: ClassVar[bool] = True

    keep: bool = setting("reuse a copy's memory for the next copy, which is several times faster", default=True)

    _pool: Pool | None = internal(None)
    _streams: dict[torch.device, torch.cuda.Stream] = internal(factory=dict)
    _pending: list[PendingCopy] = internal(factory=list)

    @torch.no_grad()
    def stage(self, state_dict: NodeState) -> Future[NodeState]:
        """Return a future CPU copy of the state. Its memory is reused after the last copied tensor is freed."""
        if self._pool is None:
            self._pool = Pool(kept=KEPT if self.keep else 0, pinned=torch.cuda.is_available())
        staged, copies = plan_copies(state_dict, self._pool)
        events = self._copy_by_streams([copy for copy in copies if copy.source.is_cuda])
        later = [copy for copy in copies if not copy.source.is_cuda and not _copy_if_small(copy)]
        future = submit_in_new_thread("staging", lambda: _finish_copies_in_thread(staged, copies, later, events))
        self._pending = [copy for copy in self._pending if not copy.future.done() or copy.future.exception()]
        self._pending.append(PendingCopy(future, events, on_cpu=bool(later)))
        return future

    def synchronize_staging(self) -> None:
        """Wait until the state may change. For GPU tensors, the current stream waits instead of the host."""
        pending, self._pending = self._pending, []
        for pending_copy in pending:
            for event in pending_copy.events:
                event.wait()
            if pending_copy.on_cpu or pending_copy.future.done():
                pending_copy.future.result()

    def close(self) -> None:
        """Free the copies' memory; for copies in use, as soon as they are freed."""
        self._pending = []
        self._streams = {}
        if self._pool is not None:
            self._pool.free_and_stop_pooling()
            self._pool = None

    def _copy_by_streams(self, copies: list[Copy]) -> list[torch.cuda.Event]:
        events = []
        for device in {copy.source.device for copy in copies}:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            # the copy starts after the kernels that write the state
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for copy in copies:
                    if copy.source.device == device:
                        copy.copy_tensor(non_blocking=True)
            events.append(stream.record_event())
        return events


def _copy_if_small(copy: Copy) -> bool:
    if copy.target.nbytes <= SMALL:
        copy.copy_tensor()
        return True
    return False


def _finish_copies_in_thread(
    staged: dict[str, Any], copies: list[Copy], later: list[Copy], events: list[torch.cuda.Event]
) -> dict[str, Any]:
    """Copy CPU tensors, and wait for the copies from GPUs; runs in a thread."""
    with torch.no_grad():
        for copy in later:
            copy.copy_tensor()
    for event in events:
        while not event.query():  # type: ignore[no-untyped-call]
            time.sleep(0.001)  # event.synchronize() may spin, which would take a core from training
    copies.clear()  # the sources must live until here, so that the allocator does not reuse their memory
    return staged
