"""How full the rows of training are."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from drawloom.components.ports.data import PackedDataset
from drawloom.components.ports.run import Accumulator, Step, Value
from drawloom.graph import component


@component(impact="safe")
class FillRate:
    """`fill_rate`: the fraction of all training rows that is tokens of documents, and no padding."""

    rows: PackedDataset
    accumulators: ClassVar[Mapping[str, Accumulator]] = {}

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """Nothing: the data set knows it."""
        return {}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """The same in every step."""
        return {"fill_rate": self.rows.fill_rate("train")}
