"""Fraction of training rows without padding."""

from drawloom import component
from drawloom.ports import Metric, MetricTotals, MetricValues, PackedDataset, Step


@component(impact="safe")
class FillRate(Metric):
    """`fill_rate`: the fraction of positions in training rows that are not padding."""

    rows: PackedDataset

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the fill rate, the same in every step."""
        return {"fill_rate": self.rows.fill_rate("train")}
