"""Step reports: metrics for the trackers, and step lines for the log."""

import logging
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from drawloom import NodeView, Problem, ResolvedRecipe, component, internal, setting
from drawloom.ports import (
    METRIC_TOTALS,
    STEP_LINE,
    Accumulator,
    Cadence,
    ContextTracker,
    Device,
    DistributionMetric,
    DistributionTracker,
    Durable,
    Event,
    EventKind,
    Histogram,
    Interval,
    Mark,
    Mesh,
    Metric,
    MetricValues,
    PropertyTracker,
    Span,
    Step,
    Tracker,
    Value,
    describe_cadence_fault,
    is_due,
    mark_time,
    split_by_context,
)

OPS = ("sum", "max", "min")


@attrs.frozen
class Measurements:
    """A step's numbers and histograms, by name."""

    values: MetricValues
    distributions: Mapping[str, Histogram]


def wait_and_compute_measurements(metrics: Sequence[Metric], step: Step) -> Measurements:
    """Compute a measured step's metrics from their totals, after waiting until the totals are on the host."""
    rest = {
        op: iter(_split_accumulators(metrics, op, packed))
        for op, packed in step.state.read_on_host(METRIC_TOTALS).items()
    }
    values: dict[str, Value] = {}
    distributions: dict[str, Histogram] = {}
    for metric in metrics:
        totals = {name: next(rest[accumulator.op]) for name, accumulator in metric.accumulators.items()}
        values |= metric.compute(totals, step)
        if isinstance(metric, DistributionMetric):
            distributions |= metric.distributions(totals, step)
    return Measurements(values, distributions)


def reduce_metrics_over_ranks(metrics: Sequence[Metric], step: Step, mesh: Mesh, device: Device) -> None:
    """Combine every metric's accumulators over ranks, and write the totals into the step's state. Does not wait."""
    parts = [(metric.accumulators, metric.measure_on_rank(step)) for metric in metrics]
    packed = {
        op: torch.cat(tensors) for op in OPS if (tensors := [*_flatten_accumulators(parts, op, mesh, device.device)])
    }
    for op, tensor in packed.items():
        if op == "sum":
            mesh.world.sum(tensor)
        elif op == "max":
            mesh.world.max(tensor)
        else:
            mesh.world.max(tensor.neg_())
            tensor.neg_()
    step.state[METRIC_TOTALS] = packed


def _flatten_accumulators(
    parts: Sequence[tuple[Mapping[str, Accumulator], Mapping[str, Tensor]]],
    reduce_op: str,
    mesh: Mesh,
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield this rank's flattened accumulators for one op; the op's identity where only another rank's counts."""
    is_first = mesh.indices.tensor == 0
    counts = {
        "activations": True,
        "data": is_first,
        "rows": is_first and mesh.indices.context == 0,
        "model": mesh.replica_group.rank == 0,
    }
    for accumulators, update in parts:
        for name, accumulator in accumulators.items():
            if accumulator.op == reduce_op:
                has_part = name in update and (reduce_op != "sum" or counts[accumulator.scope])
                part = update[name] if has_part else accumulator.identity_element()
                # A blocking copy of a part on the CPU, such as a count, would wait for the GPU's queue.
                part = part.detach().to(device, torch.float64, non_blocking=device.type == "cuda")
                yield part.reshape(accumulator.shape).flatten()


def _split_accumulators(metrics: Sequence[Metric], reduce_op: str, packed: Tensor) -> Iterator[Tensor]:
    """Yield the reduced accumulators for one op, in their shapes, from one flat tensor."""
    offset = 0
    for metric in metrics:
        for accumulator in metric.accumulators.values():
            if accumulator.op == reduce_op:
                size = torch.Size(accumulator.shape).numel()
                yield packed[offset : offset + size].view(accumulator.shape)
                offset += size


VALIDATION = ("validation_loss", "validation_reward")
"""Numbers that are also measured before the first step."""

log = logging.getLogger("drawloom.run")


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
        self._report_waiting_step()
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
        reduce_metrics_over_ranks(self.metrics, step, self.mesh, self.device)
        self._end_interval(step)
        self.mesh.world.wait_and_raise_if_broken()  # a wrong number would be tracked
        self._waiting = step
        if step.state.is_on_host or step.is_last or self.mesh.world.may_break:  # a lost rank would keep its numbers
            self._report_waiting_step()

    def flush(self) -> None:
        """Report a waiting step, and return when the trackers' files are on disk."""
        self._report_waiting_step()
        for tracker in self.trackers:
            if isinstance(tracker, Durable):
                tracker.flush()

    def close(self) -> None:
        """Report a waiting step, the last one in a stopped run."""
        self._report_waiting_step()

    def _end_interval(self, step: Step) -> None:
        """End the step's interval; the collective before was the slowest rank's, so all ranks have the same one."""
        now = mark_time(self.device.device)
        if self._interval_start is not None:
            step.interval = Interval(self._interval_start, now, (*self._excluded, *step.excluded))
        step.excluded = self._excluded = []  # the step goes on: a save after it belongs to the next interval
        self._interval_start = None if step.goes_back else now

    def _report_initial_validation(self, step: Step) -> None:
        """Report the evaluation before the first step, as step 0."""
        names = [name for name in VALIDATION if f"initial_{name}" in step.state]
        if names:
            values = {name: step.state.number(f"initial_{name}") for name in names}
            self._call_trackers_and_drop_failing(
                lambda tracker: _send_measurements(tracker, 0, Measurements(values, {}))
            )
            if isinstance(self.every, int):
                log.info("%s", format_step_line(Step(0, step.total), values), extra={"step_line": True})

    def _report_waiting_step(self) -> None:
        """Report the waiting step, if there is one, after waiting for its numbers."""
        with self._lock:
            step, self._waiting = self._waiting, None
            if step is not None:
                self._track_and_log_step(step, wait_and_compute_measurements(self.metrics, step))

    def _track_and_log_step(self, step: Step, measurements: Measurements) -> None:
        """Send a step to the trackers, and log its line or why it was skipped."""
        values = measurements.values
        self._call_trackers_and_drop_failing(lambda tracker: _send_measurements(tracker, step.index, measurements))
        if step.skip_reason:
            log.warning("step %d/%d skipped: %s", step.index, step.total, step.skip_reason)
        elif self._should_log_step(step, values):
            seconds = self._estimate_seconds_left(step)
            left = f"  {timedelta(seconds=round(seconds))} left" if seconds else ""
            log.info("%s%s", format_step_line(step, values), left, extra={STEP_LINE: True})

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
                    log.exception(text, type(tracker).__name__, why)


def _send_properties(tracker: Tracker, properties: Mapping[str, Any]) -> None:
    if isinstance(tracker, PropertyTracker):
        tracker.store_properties(properties)


def _send_measurements(tracker: Tracker, step: int, measurements: Measurements) -> None:
    """Send a step's values to a tracker, by context and with histograms if it accepts them."""
    if isinstance(tracker, ContextTracker):
        for context, values in split_by_context(measurements.values):
            tracker.track_in_context(step, values, context)
    else:
        tracker.track(step, measurements.values)
    if measurements.distributions and isinstance(tracker, DistributionTracker):
        tracker.track_distributions(step, measurements.distributions)


def _measures_distributions(metric: NodeView) -> bool:
    """Return whether a metric, or any member of a metric group, measures distributions."""
    members = metric.neighbours("members")
    if members:
        return any(map(_measures_distributions, members))
    return issubclass(metric.component, DistributionMetric)


def format_step_line(step: Step, values: MetricValues) -> str:
    """Return `step 12/300 loss 2.3456 grad_norm 0.83 ...`, without missing values."""
    parts = [form(number) for name, form in FORMATS.items() if (number := values.get(name)) is not None]
    times = [
        f"{label} {_format_number(number)}"
        for name, label in TIME_LABELS.items()
        if (number := values.get(name)) is not None
    ]
    return "  ".join([f"step {step.index}/{step.total}", *parts, *times]) + (" s" if times else "")


def _format_number(number: float) -> str:
    return f"{number:.2f}" if abs(number) >= 0.1 else f"{number:#.2g}"


FORMATS: Mapping[str, Callable[[float], str]] = {
    "loss": lambda number: f"loss {number:.4f}",
    "validation_loss": lambda number: f"validation loss {number:.4f}",
    "reward": lambda number: f"reward {number:.4f}",
    "validation_reward": lambda number: f"validation reward {number:.4f}",
    "grad_norm": lambda number: f"grad_norm {_format_number(number)}",
    "lr": lambda number: f"lr {number:#.2g}",
    "tokens_per_second": lambda number: f"{number:,.0f} tokens/s",
    "device_tokens_per_second": lambda number: f"{number:,.0f} each",
    "tflops": lambda number: f"{number:,.3g} TFLOP/s",
    "mfu": lambda number: f"{100 * number:.1f} % MFU",
    "memory": lambda number: f"{number / 1e6:,.0f} MB",
}

TIME_LABELS: Mapping[str, str] = {
    "seconds/data": "data",
    "seconds/forward_backward": "fwd-bwd",
    "seconds/sync": "sync",
    "seconds/update": "update",
}
"""Labels of times in the step line, by metric."""
