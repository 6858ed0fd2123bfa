"""Seconds lost with losses of ranks in a run that continues in memory."""

import time
from collections.abc import Callable
from itertools import pairwise
from typing import ClassVar

import attrs

from drawloom import component, internal
from drawloom.ports import Event, EventKind, Mesh, Metric, MetricTotals, MetricValues, Step

PREFIX = "recovery/"
PARTS = ("repeat", "detect", "agree", "rebuild", "transfer")
"""Parts of a recovery, in order of time."""


@attrs.define
class Marks:
    """Times on the monotonic clock: the interrupted step's start, and the ends of the parts of a recovery."""

    step_start: float
    progress: float  # end of the interrupted step's last finished phase
    failure: float = 0.0
    agreement: float = 0.0
    reopening: float = 0.0

    def compute_seconds_by_part(self, step_start: float) -> dict[str, float]:
        """Return the seconds by part; `step_start` is the start of the repeated step."""
        times = (self.step_start, self.progress, self.failure, self.agreement, self.reopening, step_start)
        return {part: end - start for part, (start, end) in zip(PARTS, pairwise(times), strict=True)}


@component(impact="safe")
class Recovery(Metric):
    """
    `recovery/repeat`, `detect`, `agree`, `rebuild` and `transfer`: seconds lost when ranks leave or join a run.

    If `processes.on_failure` is "continue", the first step afterwards has these values; other steps have none. They are
    the interrupted step's finished phases, computed again; the time until this rank notices the loss; the
    agreement on the remaining ranks; the reopened graph with new groups; and the state, restored or
    received. Losses in a row before the repeated step count together. Times are measured on rank 0.
    """

    mesh: Mesh
    observes: ClassVar[tuple[EventKind, ...]] = ("run_started", "step_started", "phase_ended", "step_ended")

    clock: Callable[[], float] = internal(time.monotonic)
    _marks: Marks | None = internal(None)  # of the running step, or of its interruption
    _seconds: dict[str, float] = internal(factory=dict)  # by part, for the present step
    _measured: dict[str, float] = internal(factory=dict)

    def on_event(self, event: Event) -> None:
        """Note the progress of a step, and the end of a recovery."""
        now = self.clock()
        if event.kind == "run_started" and self._marks is not None:
            self._marks.reopening = now
        elif event.kind == "step_started":
            if self._marks is not None and self._marks.reopening:
                for part, seconds in self._marks.compute_seconds_by_part(now).items():
                    self._seconds[part] = self._seconds.get(part, 0.0) + seconds
            self._marks = Marks(now, now)
        elif self._marks is not None:
            self._marks.progress = now
            if event.kind == "step_ended":
                self._marks.step_start = now  # a loss between steps repeats nothing
                self._seconds = {}

    def on_failure(self, error: BaseException) -> None:
        """Note when this rank notices a loss."""
        if self._marks is not None:
            self._marks.failure = self.clock()

    def hand_over(self) -> tuple[Marks | None, dict[str, float]]:
        """Return the interrupted step's times, and the seconds from earlier recoveries before the step was repeated."""
        if self._marks is not None:
            self._marks.agreement = self.clock()
        return self._marks, self._seconds

    def take_over(self, values: tuple[Marks | None, dict[str, float]]) -> None:
        """Go on with the times of the failed attempt."""
        self._marks, self._seconds = values

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """Keep this step's seconds until `compute`, which on a GPU is a step later."""
        self._measured = {**self._seconds}
        return {}

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the seconds by part, if this step was repeated."""
        return {f"{PREFIX}{part}": seconds for part, seconds in self._measured.items()}
