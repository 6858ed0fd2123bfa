"""Times for a step's phases."""

import time
from collections.abc import Callable
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

from drawloom import Every, component, internal
from drawloom.graph.component import find_declared_reads_and_writes
from drawloom.ports import (
    Device,
    Event,
    EventKind,
    Mark,
    Metric,
    MetricTotals,
    MetricValues,
    Phase,
    Step,
    compute_seconds_between,
    mark_time,
)

DATA, PASSES, SYNC, UPDATE, OTHER = "data", "forward_backward", "sync", "update", "other"


@component(impact="safe")
class PhaseTimes(Metric):
    """
    Seconds by part of a step: `seconds/data`, `forward_backward`, `sync`, `update`, and every other phase by its name.

    `data` is how long the phase that computes gradients waits for data, `sync` the phase that sums gradients over
    ranks, and `update` all later phases that change gradients or weights. A step, `seconds/step`, is the interval from
    one report to the next; phases after the report belong to the next step. `other` is the time between phases, and
    all parts add up to the step. `excluded` is the time in some of these parts, such as evaluations and saving, that
    counts in no rate. Times are measured on rank 0; on a GPU by events, without blocking the host, so
    `data` is the GPU's idle time.
    """

    device: Device
    phases: Every[Phase]
    observes: ClassVar[tuple[EventKind, ...]] = ("step_started", "phase_started", "data_loaded", "phase_ended")

    clock: Callable[[], float] = internal(time.monotonic)
    # marks with the name of the part that ended there
    _marks: list[tuple[str, Mark]] = internal(factory=list)
    _measured: list[tuple[str, Mark]] = internal(factory=list)
    _phase: str = internal("")
    _measuring: str = internal("")  # name of the measuring phase
    _goes_back: bool = internal(False)

    def on_event(self, event: Event) -> None:
        """Mark where phases begin and end, and where data loading ends."""
        if event.kind == "step_started":
            if self._goes_back:  # the interval starts anew, after the restored checkpoint
                self._marks, self._goes_back = [], False
            return
        self._phase = event.phase or self._phase
        ended = self._part_by_phase.get(event.phase, event.phase)
        part = {"data_loaded": DATA, "phase_ended": ended}.get(event.kind, OTHER)
        self._marks.append((part, mark_time(self.device.device, self.clock)))

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """Keep the marks since the last measurement until `compute`, on a GPU a step later."""
        self._measured, self._marks = self._marks, []
        self._measuring, self._goes_back = self._phase, step.goes_back
        return {}

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the seconds between consecutive marks, by the second mark's name."""
        if step.interval is None:
            return {}
        marks = [(OTHER, step.interval.start), *self._measured, (self._measuring, step.interval.end)]
        times: dict[str, float] = {}
        for (_, start), (name, end) in pairwise(marks):
            times[name] = times.get(name, 0.0) + compute_seconds_between(start, end)
        times["step"] = step.interval.total_seconds
        if step.interval.excluded:
            times["excluded"] = step.interval.excluded_seconds
        return {f"seconds/{name}": seconds for name, seconds in times.items()}

    @cached_property
    def _part_by_phase(self) -> dict[str, str]:
        """`forward_backward`, `sync` or `update` by phases' names, from their declared values."""
        parts = {}
        for name, phase in self.phases.items():
            flow = find_declared_reads_and_writes(phase)
            if "local_gradients" in flow.writes:
                parts[name] = PASSES
            elif "gradients" in flow.writes:
                parts[name] = SYNC
            elif {*flow.writes, *flow.changes} & {"gradients", "weights", "lr_factor"}:
                parts[name] = UPDATE
        return parts
