"""Several metrics as one."""

from collections.abc import Mapping

import attrs
from torch import Tensor

from drawloom.components.ports.run import Accumulator, Metric, Step, Value
from drawloom.components.ports.tracking import DistributionMetric, Histogram
from drawloom.graph import component, setting


@component(impact="safe")
class MetricGroup:
    """Its members' values, all of them with `prefix` before their names."""

    members: list[Metric] = attrs.field(factory=list)
    prefix: str = setting(default="", doc="what stands before each name: 'train/' makes loss train/loss")

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """Those of all members, numbered."""
        return {
            f"{number}/{name}": each
            for number, member in enumerate(self.members)
            for name, each in member.accumulators.items()
        }

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """What each member gives."""
        return {
            f"{number}/{name}": each
            for number, member in enumerate(self.members)
            for name, each in member.update(step).items()
        }

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """Each member's values, from its own totals."""
        values: dict[str, Value] = {}
        for number, member in enumerate(self.members):
            own = {name: totals[f"{number}/{name}"] for name in member.accumulators}
            values |= {self.prefix + name: value for name, value in member.compute(own, step).items()}
        return values

    def distributions(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Histogram]:
        """Return the histograms of the members that measure distributions, from their own totals."""
        found: dict[str, Histogram] = {}
        for number, member in enumerate(self.members):
            if isinstance(member, DistributionMetric):
                own = {name: totals[f"{number}/{name}"] for name in member.accumulators}
                found |= {self.prefix + name: each for name, each in member.distributions(own, step).items()}
        return found
