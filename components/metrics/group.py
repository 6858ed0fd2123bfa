"""Groups of metrics."""

from collections.abc import Mapping

import attrs

from drawloom import component, setting
from drawloom.ports import Accumulator, DistributionMetric, Histogram, Metric, MetricTotals, MetricValues, Step, Value


@component(impact="safe")
class MetricGroup:
    """All members' values, with `prefix` before their names."""

    members: list[Metric] = attrs.field(factory=list)
    prefix: str = setting("prefix of every name: 'train/' makes loss train/loss", default="")

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """All members' accumulators, with the member's index in the name."""
        return {
            f"{number}/{name}": accumulator
            for number, member in enumerate(self.members)
            for name, accumulator in member.accumulators.items()
        }

    def measure_on_rank(self, step: Step) -> MetricTotals:
        return {
            f"{number}/{name}": tensor
            for number, member in enumerate(self.members)
            for name, tensor in member.measure_on_rank(step).items()
        }

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return every member's values, from the member's totals."""
        values: dict[str, Value] = {}
        for number, member in enumerate(self.members):
            own = {name: totals[f"{number}/{name}"] for name in member.accumulators}
            values |= {self.prefix + name: value for name, value in member.compute(own, step).items()}
        return values

    def distributions(self, totals: MetricTotals, step: Step) -> Mapping[str, Histogram]:
        """Return the histograms from members that measure distributions."""
        histograms: dict[str, Histogram] = {}
        for number, member in enumerate(self.members):
            if isinstance(member, DistributionMetric):
                own = {name: totals[f"{number}/{name}"] for name in member.accumulators}
                named = member.distributions(own, step)
                histograms |= {self.prefix + name: histogram for name, histogram in named.items()}
        return histograms
