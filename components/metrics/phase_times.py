"""Times for a step's phases."""

import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from drawloom.components.ports.distributed import Device
from drawloom.components.ports.run import Event, EventKind, Phase, Step
from drawloom.components.ports.tracking import Accumulator, Value
from drawloom.graph import Every, component
from drawloom.graph.component import find_declared_reads_and_writes

DATA, PASSES, SYNC, UPDATE = "data", "forward_backward", "sync", "update"


@component(impact="safe")
class PhaseTimes:
    """
    `seconds/data`, `seconds/forward_backward`, `seconds/sync`, `seconds/update`, and seconds for every other phase.

    `data` is how long the phase that computes gradients waits for data, `sync` the phase that sums gradients over
    ranks, and `update` all later phases that change gradients or weights. Phases after the measuring phase are left
    out. Times are measured on rank 0; on a GPU by events, without blocking the host, so `data` is the GPU's idle time.
    """

    device: Device
    phases: Every[Phase]
    observes: ClassVar[tuple[EventKind, ...]] = ("step_started", "phase_started", "data_loaded", "phase_ended")
    accumulators: ClassVar[Mapping[str, Accumulator]] = {}

    clock: Callable[[], float] = attrs.field(init=False, default=time.monotonic)
    # marks with the name of the part that ended there; the first mark has no name
    _marks: list[tuple[str, Any]] = attrs.field(init=False, factory=list)
    _measured: list[tuple[str, Any]] = attrs.field(init=False, factory=list)

    def on_event(self, event: Event) -> None:
        """Mark where phases begin and end, and where data loading ends."""
        if event.kind == "step_started":
            self._marks = []
        elif event.kind == "data_loaded":
            self._mark_present_time(DATA)
        elif event.kind == "phase_started":
            self._mark_present_time("")
        elif event.kind == "phase_ended":
            self._mark_present_time(self._classify_phase(event.phase))

    def measure_on_rank(self, step: Step) -> Mapping[str, Tensor]:
        """Keep this step's marks until `compute`, which on a GPU is a step later."""
        self._measured = [*self._marks]
        return {}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """Return the seconds between consecutive marks, by the second mark's name."""
        times: dict[str, float] = {}
        for (_, start), (name, end) in pairwise(self._measured):
            if name:
                times[name] = times.get(name, 0.0) + _seconds_between_marks(start, end)
        return {f"seconds/{name}": seconds for name, seconds in times.items()}

    def _mark_present_time(self, name: str) -> None:
        """Record the present time, on a GPU by an event, under a name."""
        if self.device.device.type == "cuda":
            mark: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            mark.record()
        else:
            mark = self.clock()
        self._marks.append((name, mark))

    def _classify_phase(self, phase_name: str) -> str:
        """Return `forward_backward`, `sync` or `update` by a phase's declared values; otherwise the phase's name."""
        if phase_name not in self.phases:
            return phase_name
        flow = find_declared_reads_and_writes(self.phases[phase_name])
        if "local_gradients" in flow.writes:
            return PASSES
        if "gradients" in flow.writes:
            return SYNC
        changed = {*flow.writes, *flow.changes}
        return UPDATE if changed & {"gradients", "weights", "lr_factor"} else phase_name


def _seconds_between_marks(start: Any, end: Any) -> float:
    """Return the seconds between two marks."""
    if not isinstance(start, float):
        end.synchronize()  # does not block, because the totals of the step have arrived
        return float(start.elapsed_time(end)) / 1000
    return float(end - start)
