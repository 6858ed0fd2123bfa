"""Contracts for ports of trackers and metrics beyond numbers."""

import math

from drawloom.components.ports.run import Metric, Step, Tracker
from drawloom.components.ports.tracking import (
    ContextTracker,
    DistributionMetric,
    DistributionTracker,
    Histogram,
    PropertyTracker,
)
from drawloom.graph.testing import expect


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
