"""Copies made while the next step's gradients are computed."""

import time
from concurrent.futures import Future
from typing import Any, ClassVar

import attrs
import torch

from drawloom.components.checkpoint.staging.copy_plan import Copy, plan_copies
from drawloom.components.checkpoint.staging.pinned_pool import KEPT, Pool
from drawloom.components.checkpoint.threads import submit
from drawloom.graph import component, setting

SMALL = 2**16  # bytes; smaller tensors are copied at once: counters and sums may change before the weights do


@attrs.frozen
class Underway:
    """A copy that has begun: its future, and the CUDA events after which the copies from GPUs are done."""

    future: Future[dict[str, Any]]
    events: list[torch.cuda.Event]
    on_cpu: bool


@component(impact="safe")
class Overlapped:
    """
    Copies the state while training goes on; the next optimizer step waits for the copy, and not for the disk.

    From a GPU it is copied by a stream of its own, elsewhere by a thread. Tensors of at most 64 KiB that are on the
    CPU are copied at once.
    """

    copies: ClassVar[bool] = True

    keep: bool = setting(
        default=True, doc="whether memory is kept for the next copy, which is then several times faster"
    )
    type_check: bool = setting(
        default=True, doc="whether values of unknown types are refused; if not, Python copies them"
    )

    _synchronize_after_execute: bool = attrs.field(init=False, default=True)
    _pool: Pool | None = attrs.field(init=False, default=None)
    _streams: dict[torch.device, torch.cuda.Stream] = attrs.field(init=False, factory=dict)
    _underway: list[Underway] = attrs.field(init=False, factory=list)

    @property
    def should_synchronize_after_execute(self) -> bool:
        """True: torch waits for the copy, unless the caller uses `synchronize_staging` before the state changes."""
        return self._synchronize_after_execute

    @torch.no_grad()
    def stage(self, state_dict: dict[str, Any]) -> Future[dict[str, Any]]:
        """A future copy of the state on the CPU. Its memory is reused when the last tensor of it is gone."""
        if self._pool is None:
            self._pool = Pool(kept=KEPT if self.keep else 0, pinned=torch.cuda.is_available())
        staged, copies = plan_copies(state_dict, self._pool, type_check=self.type_check)
        events = self._copy_by_streams([copy for copy in copies if copy.source.is_cuda])
        later = [copy for copy in copies if not copy.source.is_cuda and not _copied_at_once(copy)]
        future = submit("staging", lambda: _finish(staged, copies, later, events))
        self._underway = [each for each in self._underway if not each.future.done() or each.future.exception()]
        self._underway.append(Underway(future, events, on_cpu=bool(later)))
        return future

    def synchronize_staging(self) -> None:
        """
        Return when the state may change. For tensors on a GPU that is at once: work that is enqueued on the current
        stream from now on runs after the copy.
        """
        underway, self._underway = self._underway, []
        for each in underway:
            for event in each.events:
                event.wait()
            if each.on_cpu or each.future.done():
                each.future.result()

    def close(self) -> None:
        """Free the memory of copies; of those in use, when they are gone."""
        self._underway = []
        self._streams = {}
        if self._pool is not None:
            self._pool.clear()
            self._pool = None

    def _copy_by_streams(self, copies: list[Copy]) -> list[torch.cuda.Event]:
        events = []
        for device in {copy.source.device for copy in copies}:
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for copy in copies:
                    if copy.source.device == device:
                        copy.make(non_blocking=True)
            events.append(stream.record_event())
        return events


def _copied_at_once(copy: Copy) -> bool:
    if copy.bytes <= SMALL:
        copy.make()
        return True
    return False


def _finish(
    staged: dict[str, Any], copies: list[Copy], later: list[Copy], events: list[torch.cuda.Event]
) -> dict[str, Any]:
    """Runs in a thread. It holds all sources until their copies are done, so that their memory is not reused."""
    with torch.no_grad():
        for copy in later:
            copy.make()
    for event in events:
        while not event.query():  # type: ignore[no-untyped-call]
            time.sleep(0.001)  # event.synchronize() may spin, and takes a core from training
    copies.clear()
    return staged
