"""Fraction of training rows without padding."""

from collections.abc import Mapping

from torch import Tensor

from drawloom import component
from drawloom.ports import Metric, PackedDataset, Step, Value


@component(impact="safe")
class FillRate(Metric):
    """`fill_rate`: the fraction of positions in training rows that are not padding."""

    rows: PackedDataset

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """Return the fill rate, the same in every step."""
        return {"fill_rate": self.rows.fill_rate("train")}
