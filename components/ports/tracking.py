"""Optional tracker capabilities: histograms, value contexts, and run properties."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import attrs
from torch import Tensor

from drawloom.components.ports.run import Step, Value
from drawloom.graph import port

Context = Mapping[str, str]
"""Labels that distinguish values of one name: `{"phase": "train"}` or `{"phase": "validation"}`."""

_VALIDATION = "validation_"
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

    def distributions(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Histogram]:
        """Return histograms by name, as `compute` does for values; {} at steps without a measurement."""
        ...


@port
@runtime_checkable
class DistributionTracker(Protocol):
    """A tracker that stores histograms."""

    def track_distributions(self, step: int, distributions: Mapping[str, Histogram]) -> None:
        """Store a step's histograms, before or after its values."""
        ...


@port
@runtime_checkable
class ContextTracker(Protocol):
    """A tracker that stores one name's values in several contexts; `track_in_context` replaces `track`."""

    def track_in_context(self, step: int, values: Mapping[str, Value], context: Context) -> None:
        """Store a step's values with their context."""
        ...


@port
@runtime_checkable
class PropertyTracker(Protocol):
    """A tracker that stores run properties (hyperparameters) beside its values."""

    def store_properties(self, properties: Mapping[str, Any]) -> None:
        """Store the run's settings, as nested tables; called once, before `rewind`."""
        ...


def split_by_context(values: Mapping[str, Value]) -> list[tuple[Context, dict[str, Value]]]:
    """Split a step's values into training and validation values, and strip `validation_` from the latter's names."""
    training = {name: value for name, value in values.items() if not name.startswith(_VALIDATION)}
    validation = {name.removeprefix(_VALIDATION): values[name] for name in values.keys() - training.keys()}
    split: list[tuple[Context, dict[str, Value]]] = [
        ({"phase": "train"}, training),
        ({"phase": "validation"}, validation),
    ]
    return [(context, named) for context, named in split if named]


def flatten_properties(properties: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables: `{"optimizer": {"lr": 0.1}}` becomes `{"optimizer.lr": 0.1}`."""
    flat: dict[str, Any] = {}
    for name, value in properties.items():
        flat |= flatten_properties(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat
