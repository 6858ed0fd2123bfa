"""Named sum from the loss: per token, per microbatch, or per step."""

from collections.abc import Mapping
from typing import Literal

import torch

from drawloom import component, setting
from drawloom.components.metrics.named_sums import (
    compute_microbatch_means_over_context,
    read_losses_on_last_stage,
    sum_scalar_over_microbatches,
    sum_weights,
)
from drawloom.ports import Accumulator, Mesh, MetricTotals, MetricValues, Step


@component(impact="safe")
class Mean:
    """
    Mean of `of`, a named sum from the loss such as `accuracy` or `z_loss`, over all microbatches and replicas.

    Per `token`, the sum is divided by the token weights, so the mean does not depend on gradient accumulation; per
    `microbatch`, the value averages the microbatches' means; per `step`, it is the sum itself.
    """

    mesh: Mesh
    of: str = setting("name of the loss's sum, or 'loss'")
    per: Literal["token", "microbatch", "step"] = setting(
        "divisor of the sum: token weights, microbatches, or 1", default="token"
    )
    name: str = setting("name in logs; default: the sum's name", default="")

    @property
    def accumulators(self) -> Mapping[str, Accumulator]:
        """The sum and its divisor; per microbatch, ranks along `context` have the same values, and one rank counts."""
        accumulator = Accumulator(scope="rows" if self.per == "microbatch" else "data")
        return {"total": accumulator, "count": accumulator}

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """Return sum and divisor on this rank, 0-dimensional, or {} on ranks without the last stage."""
        if (losses := read_losses_on_last_stage(step)) is None:
            return {}
        if self.per == "microbatch":
            means = compute_microbatch_means_over_context(losses, self.of, self.mesh)
            return {"total": means.nansum(), "count": (~means.isnan()).sum()}
        return {"total": sum_scalar_over_microbatches(losses, self.of), "count": sum_weights(losses)}

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the mean, None if it is not finite or all the step's weights are 0."""
        total = totals["total"] if self.per == "step" else totals["total"] / totals["count"]
        return {self.name or self.of: float(total) if torch.isfinite(total) and totals["count"] > 0 else None}
