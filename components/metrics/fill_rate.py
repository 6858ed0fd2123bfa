"""Fraction of training rows without padding."""

from collections.abc import Mapping

from torch import Tensor

from drawloom.components.ports.data import PackedDataset
from drawloom.components.ports.run import Step
from drawloom.components.ports.tracking import Metric, Value
from drawloom.graph import component


@component(impact="safe")
class FillRate(Metric):
    """`fill_rate`: the fraction of positions in training rows that are not padding."""

    rows: PackedDataset

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """Return the fill rate, the same in every step."""
        return {"fill_rate": self.rows.fill_rate("train")}
