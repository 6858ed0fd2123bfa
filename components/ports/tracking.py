"""Ports for metrics and trackers, with optional capabilities: histograms, value contexts, and run properties."""

from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

import attrs
import torch
from torch import Tensor

from drawloom import port
from drawloom.components.ports.run import Step

METRIC_TOTALS = "metric_totals"
"""The name of the metrics' totals in the state of a step: a dict by op of float64 tensors (numbers,)."""

Value = float | bool | None
"""The value of a metric; None if the metric has no value at this step."""

MetricValues = Mapping[str, Value]

MetricTotals = Mapping[str, Tensor]
"""Tensors by accumulator: of a rank, or float64 over all ranks."""


@attrs.frozen
class Accumulator:
    """
    A float64 tensor with fixed shape, combined over ranks at every step.

    `scope` selects the ranks that contribute to a sum, so that nothing counts twice. "data" is for values of losses and
    of batches, which ranks along `pipeline` and `tensor` have in common: the first rank along `tensor` with the losses
    contributes. "rows" is for counts over whole rows, which ranks along `context` also share. "activations" is for
    hidden states, which differ on all ranks. "model" is for values that replicas have in common, such as gradient
    norms: one replica contributes.
    """

    op: Literal["sum", "max", "min"] = "sum"
    shape: tuple[int, ...] = ()
    scope: Literal["data", "rows", "activations", "model"] = "data"

    def identity_element(self) -> Tensor:
        """Return the neutral element for `op`, such as 0 for a sum: the contribution from a rank without values."""
        value = {"sum": 0.0, "max": float("-inf"), "min": float("inf")}[self.op]
        return torch.full(self.shape, value, dtype=torch.float64)


@port
@runtime_checkable
class Metric(Protocol):
    """
    Numbers to record about every step.

    Every rank calls `measure_on_rank` once a step. The results are combined over all ranks, together with all other
    metrics' accumulators, and `compute` derives values from the totals, which are equal on every rank. A metric that
    reads only values known to every rank needs no accumulators.
    """

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """Accumulators to combine over ranks, by name; equal on every rank once the run is open. Default: none."""
        return {}

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """Return tensors in the accumulators' shapes, by name, on any device; an omitted one adds nothing."""
        return {}

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """
        Return this step's values by name, from float64 totals on the CPU. On a GPU it is called a step later.
        """


@port
@runtime_checkable
class Tracker(Protocol):
    """Store for metric values by step; step 0 is before training. Only rank 0 writes."""

    def track(self, step: int, values: MetricValues) -> None:
        """Store a step's values."""

    def rewind(self, step: int) -> None:
        """Delete values after `step`, from which the run resumes. Step -1 deletes all values."""


Context = Mapping[str, str]
"""Labels that distinguish values of one name: `{"phase": "train"}` or `{"phase": "validation"}`."""

"""The prefix of the names of values that were measured on validation data."""


@attrs.frozen
class Histogram:
    """Counts of a tensor's finite elements in equal bins between `low` and `high`; the last bin includes `high`."""

    low: float
    high: float
    counts: tuple[float, ...]

    @property
    def edges(self) -> list[float]:
        """Bin edges: one more than there are bins."""
        width = (self.high - self.low) / len(self.counts)
        return [*(self.low + width * number for number in range(len(self.counts))), self.high]

    @property
    def centers(self) -> list[float]:
        """Bin centers."""
        width = (self.high - self.low) / len(self.counts)
        return [self.low + width * (number + 0.5) for number in range(len(self.counts))]


@port
@runtime_checkable
class DistributionMetric(Protocol):
    """A metric that derives distributions from its totals."""

    def distributions(self, totals: MetricTotals, step: Step) -> Mapping[str, Histogram]:
        """Return histograms by name, as `compute` does for values; {} at steps without a measurement."""


@port
@runtime_checkable
class DistributionTracker(Protocol):
    """A tracker that stores histograms."""

    def track_distributions(self, step: int, distributions: Mapping[str, Histogram]) -> None:
        """Store a step's histograms, before or after its values."""


@port
@runtime_checkable
class ContextTracker(Protocol):
    """A tracker that stores one name's values in several contexts; `track_in_context` replaces `track`."""

    def track_in_context(self, step: int, values: MetricValues, context: Context) -> None:
        """Store a step's values with their context."""


@port
@runtime_checkable
class PropertyTracker(Protocol):
    """A tracker that stores run properties (hyperparameters) beside its values."""

    def store_properties(self, properties: Mapping[str, Any]) -> None:
        """Store the run's settings, as nested tables; called once, before `rewind`."""


def flatten_properties(properties: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables: `{"optimizer": {"lr": 0.1}}` becomes `{"optimizer.lr": 0.1}`."""
    flat: dict[str, Any] = {}
    for name, value in properties.items():
        flat |= flatten_properties(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
