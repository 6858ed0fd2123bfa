"""A step's numbers: combined over ranks, computed for trackers, and written as a line for the log."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs
import torch
from torch import Tensor

from drawloom.ports import (
    LOSSES,
    METRIC_TOTALS,
    Accumulator,
    ContextTracker,
    Device,
    DistributionMetric,
    DistributionTracker,
    Histogram,
    Mesh,
    Metric,
    MetricValues,
    Step,
    Tracker,
    Value,
)

OPS = ("sum", "max", "min")


@attrs.frozen
class Measurements:
    """A step's numbers and histograms, by name."""

    values: MetricValues
    distributions: Mapping[str, Histogram]


def split_metric_totals(metrics: Sequence[Metric], step: Step) -> Iterator[dict[str, Tensor]]:
    """Yield every metric's totals over all ranks, by accumulator, after waiting until they are on the host."""
    rest = {
        op: iter(_split_accumulators(metrics, op, packed))
        for op, packed in step.state.read_on_host(METRIC_TOTALS).items()
    }
    for metric in metrics:
        yield {name: next(rest[accumulator.op]) for name, accumulator in metric.accumulators.items()}


def wait_and_compute_measurements(metrics: Sequence[Metric], step: Step) -> Measurements:
    """Compute a measured step's metrics from their totals, after waiting until the totals are on the host."""
    values: dict[str, Value] = {}
    distributions: dict[str, Histogram] = {}
    for metric, totals in zip(metrics, split_metric_totals(metrics, step), strict=True):
        values |= metric.compute(totals, step)
        if isinstance(metric, DistributionMetric):
            distributions |= metric.distributions(totals, step)
    return Measurements(values, distributions)


def reduce_metrics_over_ranks(metrics: Sequence[Metric], step: Step, mesh: Mesh, device: Device) -> None:
    """Combine every metric's accumulators over ranks, and write the totals into the step's state. Does not wait."""
    parts = [(metric.accumulators, metric.measure_on_rank(step)) for metric in metrics]
    scopes = _list_counted_scopes(step, mesh)
    packed = {
        op: torch.cat(tensors) for op in OPS if (tensors := [*_flatten_accumulators(parts, op, scopes, device.device)])
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


def _list_counted_scopes(step: Step, mesh: Mesh) -> set[str]:
    """Return the scopes in which this rank's sums count: among pipeline ranks, one has losses."""
    losses = step.state.get(LOSSES)
    has_losses = len(losses["weight"]) > 0 if losses is not None else mesh.indices.pipeline == 0
    is_counted = has_losses and mesh.indices.tensor == 0
    scopes = {
        "activations": True,
        "data": is_counted,
        "rows": is_counted and mesh.indices.context == 0,
        "model": mesh.replica_group.rank == 0,
    }
    return {scope for scope, counts in scopes.items() if counts}


def _flatten_accumulators(
    parts: Sequence[tuple[Mapping[str, Accumulator], Mapping[str, Tensor]]],
    reduce_op: str,
    counted_scopes: Collection[str],
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield this rank's flattened accumulators for one op; the op's identity where only another rank's counts."""
    for accumulators, update in parts:
        for name, accumulator in accumulators.items():
            if accumulator.op == reduce_op:
                has_part = name in update and (reduce_op != "sum" or accumulator.scope in counted_scopes)
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


def send_measurements(tracker: Tracker, step: int, measurements: Measurements) -> None:
    """Send a step's values to a tracker, by context and with histograms if it accepts them."""
    if isinstance(tracker, ContextTracker):
        contexts: dict[str, dict[str, Value]] = {"train": {}, "validation": {}}
        for name, value in measurements.values.items():
            bare = name.removeprefix("validation_")
            contexts["train" if bare == name else "validation"][bare] = value
        for phase, values in contexts.items():
            if values:
                tracker.track_in_context(step, values, {"phase": phase})
    else:
        tracker.track(step, measurements.values)
    if measurements.distributions and isinstance(tracker, DistributionTracker):
        tracker.track_distributions(step, measurements.distributions)


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
