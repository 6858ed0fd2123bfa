"""Spread over microbatches by extremes and a histogram, which shows bad documents hidden by the mean."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from drawloom import NodeView, Problem, between, component, setting
from drawloom.components.metrics.named_sums import compute_microbatch_means_over_context, read_losses_on_last_stage
from drawloom.ports import Accumulator, Mesh, MetricTotals, MetricValues, Step, Value


@component(impact="safe")
class Spread:
    """
    Minimum, maximum and `quantiles`, over all microbatches and replicas, for a named sum's mean per token.

    Quantiles come from a histogram with `bins` equal bins between `low` and `high`, and are exact up to the bin
    width. Values outside count to the nearest bin. Names are `loss_min`, `loss_max`, and for quantiles like `loss_p90`.
    """

    mesh: Mesh
    of: str = setting("name of the loss's sum, or 'loss'", default="loss")
    quantiles: tuple[float, ...] = setting("quantiles from 0 to 1, such as 0.5 and 0.9", default=())
    low: float = setting("the histogram's lower bound", default=0.0)
    high: float = setting("the histogram's upper bound", default=20.0)
    bins: int = setting("number of histogram bins", default=2000, check=between(1, 1_000_001))

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Require quantiles from 0 to 1, and `low` below `high`."""
        values: Mapping[str, Any] = node.settings
        for index, part in enumerate(values["quantiles"]):
            if not 0 <= part <= 1:
                yield node.problem(("quantiles", index), f"{part} is not from 0 to 1", "write 0.9 for 90 percent")
        if not values["low"] < values["high"]:
            yield node.problem("high", f"the histogram ends at {values['high']} and begins at {values['low']}")

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """The minimum, the maximum, and the histogram if there are quantiles."""
        histogram = {"histogram": Accumulator(shape=(self.bins,), scope="rows")} if self.quantiles else {}
        return {"min": Accumulator("min"), "max": Accumulator("max"), **histogram}

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """
        Return 0-dimensional minimum and maximum, and the histogram, float64 (bins,), over microbatches with weight.

        Return {} on ranks without the last stage.
        """
        if (losses := read_losses_on_last_stage(step)) is None:
            return {}
        means = compute_microbatch_means_over_context(losses, self.of, self.mesh)
        is_nan = means.isnan()  # a microbatch without weight
        minimum, maximum = means.masked_fill(is_nan, torch.inf).min(), means.masked_fill(is_nan, -torch.inf).max()
        if not self.quantiles:
            return {"min": minimum, "max": maximum}
        index = ((means - self.low) * (self.bins / (self.high - self.low))).clamp(0, self.bins - 1)
        counts = torch.zeros(self.bins, dtype=torch.float64, device=means.device)
        counts.index_add_(0, index.nan_to_num().long(), (~is_nan).double())
        return {"min": minimum, "max": maximum, "histogram": counts}

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the values, None if no microbatch has weight; `histogram` is float64 (bins,)."""
        ends = {f"{self.of}_{name}": float(totals[name]) for name in ("min", "max")}
        values: dict[str, Value] = {key: value if abs(value) != float("inf") else None for key, value in ends.items()}
        for part in self.quantiles:
            values[f"{self.of}_p{100 * part:g}"] = self._find_quantile_bin_center(totals["histogram"], part)
        return values

    def _find_quantile_bin_center(self, counts: Tensor, fraction: float) -> float | None:
        """Return the center of the first bin with a cumulative count of at least `fraction`."""
        reached = counts.cumsum(0)
        if reached[-1] == 0:
            return None
        index = int(torch.searchsorted(reached, (fraction * reached[-1]).clamp(min=1).unsqueeze(0)))
        return self.low + (index + 0.5) * (self.high - self.low) / self.bins
