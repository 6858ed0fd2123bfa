"""Contracts for ports of metrics and trackers."""

import math

import torch

from drawloom.components.contracts.run import ObservedState
from drawloom.graph.testing import expect
from drawloom.ports import (
    ContextTracker,
    DistributionMetric,
    DistributionTracker,
    Histogram,
    Metric,
    MetricValues,
    PropertyTracker,
    Step,
    Tracker,
)


def _make_step(index: int) -> Step:
    values = {"loss": torch.tensor(2.0), "grad_norm": torch.tensor(1.0), "lr": 0.1, "tokens": 64.0}
    return Step(index, 10, ObservedState(values))


def _measure_on_a_single_rank(metric: Metric, step: Step) -> MetricValues:
    """Return the values of a metric at a step on a single rank."""
    parts = metric.measure_on_rank(step)
    for name, part in parts.items():
        expect(name in metric.accumulators, f"{name!r} is none of its accumulators")
        shape = metric.accumulators[name].shape
        expect(tuple(part.shape) == shape, f"{name} has shape {tuple(part.shape)}, and {shape} was declared")
    totals = {
        name: parts.get(name, accumulator.identity_element()).double().cpu()
        for name, accumulator in metric.accumulators.items()
    }
    return metric.compute(totals, step)


def metric_values_are_finite_numbers_booleans_or_none(metric: Metric) -> None:
    """Values are finite numbers, booleans or None; names are non-empty strings."""
    for index in (1, 2, 3):
        for name, value in _measure_on_a_single_rank(metric, _make_step(index)).items():
            expect(isinstance(name, str) and name, f"{name!r} is not a name")
            expect(value is None or isinstance(value, int | float), f"{name} is {value!r}")
            expect(value is None or math.isfinite(value), f"{name} is {value}")


def metric_names_are_equal_in_all_steps(metric: Metric) -> None:
    """All steps have the same metric names, so that a series has no gaps."""
    names = [sorted(_measure_on_a_single_rank(metric, _make_step(index))) for index in (1, 2, 3)]
    expect(names[0] == names[1] == names[2], f"the names change from step to step: {names}")


def measuring_does_not_change_the_step(metric: Metric) -> None:
    """Measuring a step does not change it."""
    step = _make_step(1)
    _measure_on_a_single_rank(metric, step)
    written = ObservedState.get_from_step(step).written
    expect(not written and (step.index, step.tokens, step.skip_reason) == (1, 64, ""), "measuring changed the step")


def accepts_every_kind_of_value(tracker: Tracker) -> None:
    """A tracker accepts numbers, booleans and None, and names with dots and slashes."""
    tracker.track(1, {"loss": 1.5, "skipped": False, "validation_loss": None, "memory/peak.bytes": 3})
    tracker.track(2, {})


def steps_can_be_rewound(tracker: Tracker) -> None:
    """A tracker can delete steps and track them again, even if there is nothing to delete."""
    for step in (1, 2, 3):
        tracker.track(step, {"loss": float(step)})
    # twice, because a run may be killed and resumed again before it tracks anything
    tracker.rewind(1)
    tracker.rewind(1)
    for step in (2, 3):
        tracker.track(step, {"loss": float(-step)})
    tracker.rewind(0)
    tracker.track(1, {"loss": 0.0})
    tracker.rewind(-1)
    tracker.track(0, {"loss": 1.0})
    tracker.track(1, {"loss": 0.0})


def steps_without_measurements_have_no_histograms(metric: DistributionMetric) -> None:
    """A step without measurements has no histograms, or only histograms with finite numbers."""
    accumulators = metric.accumulators if isinstance(metric, Metric) else {}
    totals = {name: part.identity_element() for name, part in accumulators.items()}
    for name, histogram in metric.distributions(totals, Step(1, 1)).items():
        is_finite = all(map(math.isfinite, (histogram.low, histogram.high, *histogram.counts)))
        expect(is_finite, f"the histogram {name} is {histogram}")


def tracker_accepts_histograms(tracker: DistributionTracker) -> None:
    """A tracker accepts histograms of one bin and of several bins, and names with dots and slashes."""
    wide, narrow = Histogram(-1.0, 3.0, (0.0, 5.0, 1.0, 0.0)), Histogram(0.5, 1.5, (7.0,))
    for step in (1, 2):
        tracker.track_distributions(step, {"gradients/layers.0.weight": wide, "weights/bias": narrow})
    tracker.track_distributions(3, {})


def tracker_accepts_a_name_in_several_contexts(tracker: ContextTracker) -> None:
    """A tracker accepts values of one name in two contexts of a step, and without a context."""
    for context in ({"phase": "train"}, {"phase": "validation"}, {}):
        tracker.track_in_context(1, {"loss": 1.5, "skipped": False, "lr": None}, context)


def tracker_accepts_properties_of_every_kind(tracker: PropertyTracker) -> None:
    """A tracker accepts nested tables of strings, numbers, booleans and lists before the first step."""
    run = {"name": "run", "seed": 3}
    tracker.store_properties(
        {"run": run, "optimizer": {"betas": [0.9, 0.95], "maximize": False, "groups": [{"lr": 0.1}]}}
    )
    if isinstance(tracker, Tracker):
        tracker.rewind(0)
        tracker.track(1, {"loss": 1.0})
