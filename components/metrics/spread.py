"""How much microbatches differ: one bad document shows here, and not in a mean."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from drawloom.components.metrics.named_sums import losses_of, mean_by_microbatch
from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import Accumulator, Step, Value
from drawloom.graph import Problem, between, component, setting
from drawloom.graph.wiring.node import NodeView


@component(impact="safe")
class Spread:
    """
    Least, greatest and `quantiles` over all microbatches and replicas of a named sum's mean by token.

    Quantiles are read off a histogram of `bins` equal bins between `low` and `high`, and are right to the width of a
    bin: what lies outside counts to the bin at that end. They are called `loss_p90`, say; the others `loss_min` and
    `loss_max`.
    """

    mesh: Mesh
    of: str = setting(default="loss", doc="a named sum of the loss, or 'loss'")
    quantiles: tuple[float, ...] = setting(default=(), doc="parts of 1, such as 0.5 and 0.9")
    low: float = setting(default=0.0, doc="where the histogram begins")
    high: float = setting(default=20.0, doc="where the histogram ends")
    bins: int = setting(default=2000, check=between(1, 1_000_001), doc="bins of the histogram")

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Quantiles are parts of 1, and the histogram has a width."""
        values: Mapping[str, Any] = node.settings
        for place, part in enumerate(values["quantiles"]):
            if not 0 <= part <= 1:
                yield node.problem(("quantiles", place), f"{part} is no part of 1", "write 0.9 for 90 percent")
        if not values["low"] < values["high"]:
            yield node.problem("high", f"the histogram ends at {values['high']} and begins at {values['low']}")

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """Both ends, and the histogram if quantiles are asked for."""
        histogram = {"histogram": Accumulator(shape=(self.bins,), of="rows")} if self.quantiles else {}
        return {"min": Accumulator("min"), "max": Accumulator("max"), **histogram}

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """
        Those of this rank's microbatches that have weight: 0-dimensional ends, and a histogram, float64 (bins,).

        Nothing on ranks without the last stage.
        """
        if (losses := losses_of(step)) is None:
            return {}
        means = mean_by_microbatch(losses, self.of, self.mesh)
        least, greatest = means.nan_to_num(nan=float("inf")).min(), means.nan_to_num(nan=float("-inf")).max()
        if not self.quantiles:
            return {"min": least, "max": greatest}
        place = ((means - self.low) * (self.bins / (self.high - self.low))).clamp(0, self.bins - 1)
        counts = torch.zeros(self.bins, dtype=torch.float64, device=means.device)
        counts.index_add_(0, place.nan_to_num().long(), (~means.isnan()).double())
        return {"min": least, "max": greatest, "histogram": counts}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """None where no microbatch has weight; `histogram` is float64 (bins,)."""
        ends = {f"{self.of}_{name}": float(totals[name]) for name in ("min", "max")}
        values: dict[str, Value] = {key: value if abs(value) != float("inf") else None for key, value in ends.items()}
        for part in self.quantiles:
            values[f"{self.of}_p{100 * part:g}"] = self._quantile(totals["histogram"], part)
        return values

    def _quantile(self, counts: Tensor, part: float) -> float | None:
        """The middle of the first bin up to which there are as many as `part` of all."""
        reached = counts.cumsum(0)
        if reached[-1] == 0:
            return None
        place = int(torch.searchsorted(reached, (part * reached[-1]).clamp(min=1).unsqueeze(0)))
        return self.low + (place + 0.5) * (self.high - self.low) / self.bins
