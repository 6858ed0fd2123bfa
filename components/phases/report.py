"""Step reports: metrics for the trackers, and step lines for the log."""

import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import attrs

from drawloom import NodeView, Problem, ResolvedRecipe, component, internal, setting
from drawloom.ports import (
    METRIC_TOTALS,
    STEP_LINE,
    Cadence,
    Device,
    DistributionMetric,
    DistributionTracker,
    Event,
    EventKind,
    Interval,
    Mark,
    Mesh,
    Metric,
    MetricValues,
    PropertyTracker,
    Span,
    Step,
    Tracker,
    describe_cadence_fault,
    is_due,
    mark_time,
    run_log,
)

if TYPE_CHECKING:
    from drawloom.components.phases.step_reports import Measurements

VALIDATION = ("validation_loss", "validation_reward")
"""Numbers that are also measured before the first step."""


@component(
    reads=(
        "loss",
        "grad_norm?",
        "lr?",
        "validation_loss?",
        "validation_cross_entropy?",
        "initial_validation_loss?",
        "validation_reward?",
        "initial_validation_reward?",
        "skip?",
        "tokens?",
        "losses?",
        "batches?",
    ),
    writes=(METRIC_TOTALS,),
    impact="safe",
)
class Report:
    """
    Reporter that passes every step's metrics to the trackers and logs step lines.

    It logs a line for every `every`-th step, for a process's first step, and for steps with a validation loss. An
    evaluation before the first step is reported as step 0.

    On a GPU a step is reported when the next step is measured, so the host does not wait for its numbers. The last
    step, and a step before a checkpoint, are reported at once.

    Every step is measured, whatever `every` says. A step is measured when all ranks have reached this phase, on a GPU
    by an event; rates follow from the interval since the last measurement, or since the start of a process's first
    step.
    """

    observes: ClassVar[tuple[EventKind, ...]] = ("step_started",)

    mesh: Mesh
    device: Device
    metrics: list[Metric] = attrs.field(factory=list)
    trackers: list[Tracker] = attrs.field(factory=list)
    every: Cadence = setting(
        'steps between lines in the log, or "last" or "never"', default=10, check=describe_cadence_fault
    )

    recipe: ResolvedRecipe = attrs.field(factory=lambda: ResolvedRecipe("", ""))

    _first: Step | None = internal(None)
    _second: Step | None = internal(None)
    _newest: int = internal(0)
    _interval_start: Mark | None = internal(None)
    _excluded: list[Span] = internal(factory=list)  # spans since the last measurement
    _dropped: set[int] = internal(factory=set)
    _waiting: Step | None = internal(None)
    # A checkpoint that is written in the background flushes from its own thread.
    _lock: threading.Lock = internal(factory=threading.Lock)

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Warn about metrics with distributions if no tracker stores distributions."""
        trackers = [
            tracker for tracker in node.neighbours("trackers") if issubclass(tracker.component, DistributionTracker)
        ]
        for metric in [] if trackers else filter(_measures_distributions, node.neighbours("metrics")):
            text = f"no tracker takes the distributions of [{metric.name}]"
            yield node.warning("trackers", text, 'add one that does, such as use = "trackers.tensorboard"')

    def on_event(self, event: Event) -> None:
        """Start an interval with the first step, and with the first after the run went back."""
        if self._interval_start is None:
            self._interval_start = mark_time(self.device.device)

    def run_phase(self, step: Step) -> None:
        """Measure the step; at a process's first step, or after the run went back, rewind the trackers before."""
        self.flush()
        if self._first is None:
            properties = tomllib.loads(self.recipe.text)
            self._call_trackers_and_drop_failing(lambda tracker: _send_properties(tracker, properties))
        if self._first is None or step.index <= self._newest:
            # a run that was killed, or goes back, may have tracked steps after its checkpoint
            self._call_trackers_and_drop_failing(
                lambda tracker: tracker.rewind(step.index - 1 if step.index > 1 else -1)
            )
        if self._first is None:
            self._first = step
        elif self._second is None:
            self._second = step
        self._newest = step.index
        self._report_initial_validation(step)
        from drawloom.components.phases.step_reports import reduce_metrics_over_ranks

        reduce_metrics_over_ranks(self.metrics, step, self.mesh, self.device)
        # End the step's interval; the collective before was the slowest rank's, so all ranks have the same one
        now = mark_time(self.device.device)
        if self._interval_start is not None:
            step.interval = Interval(self._interval_start, now, (*self._excluded, *step.excluded))
        step.excluded = self._excluded = []  # the step goes on: a save after it belongs to the next interval
        self._interval_start = None if step.goes_back else now
        self.mesh.world.wait_and_raise_if_broken()  # a wrong number would be tracked
        self._waiting = step
        if step.state.is_on_host or step.is_last or self.mesh.world.may_break:  # a lost rank would keep its numbers
            self.flush()

    def flush(self) -> None:
        """Report a waiting step to the trackers, after waiting for its numbers; they flush their files themselves."""
        from drawloom.components.phases.step_reports import wait_and_compute_measurements

        with self._lock:
            step, self._waiting = self._waiting, None
            if step is not None:
                self._track_and_log_step(step, wait_and_compute_measurements(self.metrics, step))

    def close(self) -> None:
        """Report a waiting step, the last one in a stopped run."""
        self.flush()

    def _report_initial_validation(self, step: Step) -> None:
        """Report the evaluation before the first step, as step 0."""
        from drawloom.components.phases.step_reports import Measurements, format_step_line, send_measurements

        names = [name for name in VALIDATION if f"initial_{name}" in step.state]
        if names:
            values = {name: step.state.number(f"initial_{name}") for name in names}
            self._call_trackers_and_drop_failing(
                lambda tracker: send_measurements(tracker, 0, Measurements(values, {}))
            )
            if isinstance(self.every, int):
                run_log.info("%s", format_step_line(Step(0, step.total), values), extra={"step_line": True})

    def _track_and_log_step(self, step: Step, measurements: "Measurements") -> None:
        """Send a step to the trackers, and log its line or why it was skipped."""
        from drawloom.components.phases.step_reports import format_step_line, send_measurements

        values = measurements.values
        self._call_trackers_and_drop_failing(lambda tracker: send_measurements(tracker, step.index, measurements))
        if step.skip_reason:
            run_log.warning("step %d/%d skipped: %s", step.index, step.total, step.skip_reason)
        elif self._should_log_step(step, values):
            seconds = self._estimate_seconds_left(step)
            left = f"  {timedelta(seconds=round(seconds))} left" if seconds else ""
            run_log.info("%s%s", format_step_line(step, values), left, extra={STEP_LINE: True})

    def _should_log_step(self, step: Step, values: MetricValues) -> bool:
        """Return whether the log gets a line for a step."""
        news = step is self._first or any(values.get(name) is not None for name in VALIDATION)
        return is_due(self.every, step) or (news and self.every not in ("last", "never"))

    def _estimate_seconds_left(self, step: Step) -> float:
        """Estimate the time for the remaining steps; 0 if unknown. The first step is left out, because it compiles."""
        second = self._second
        if second is None or step.index <= second.index:
            return 0.0
        return (step.started - second.started) / (step.index - second.index) * (step.total - step.index)

    def _call_trackers_and_drop_failing(self, call: Callable[[Tracker], object]) -> None:
        """Call a function with every tracker; a tracker that raises is not used again."""
        for index, tracker in enumerate(self.trackers):
            if index not in self._dropped:
                try:
                    call(tracker)
                except Exception as error:
                    self._dropped.add(index)
                    why = f"{type(error).__name__}: {error}"
                    text = "%s failed and gets no more values, the run continues: %s"
                    run_log.exception(text, type(tracker).__name__, why)


def _send_properties(tracker: Tracker, properties: Mapping[str, Any]) -> None:
    if isinstance(tracker, PropertyTracker):
        tracker.store_properties(properties)


def _measures_distributions(metric: NodeView) -> bool:
    """Return whether a metric, or any member of a metric group, measures distributions."""
    members = metric.neighbours("members")
    if members:
        return any(map(_measures_distributions, members))
    return issubclass(metric.component, DistributionMetric)
