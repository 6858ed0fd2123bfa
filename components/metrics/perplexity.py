"""Perplexity, exp(cross entropy)."""

import math
from collections.abc import Mapping
from typing import ClassVar

from drawloom import component, setting
from drawloom.components.metrics.named_sums import read_losses_on_last_stage, sum_scalar_over_microbatches, sum_weights
from drawloom.ports import Accumulator, MetricTotals, MetricValues, Step, Value

MAX_NATS = 700.0  # exp of more overflows float64


@component(impact="safe")
class Perplexity:
    """
    `perplexity`, exp(mean cross entropy per token), and `validation_perplexity` if a step evaluates.

    Both omit label smoothing, z-loss and other parts of the loss.
    """

    of: str = setting("name of the loss's cross entropy sum, in nats", default="cross_entropy")

    accumulators: ClassVar[Mapping[str, Accumulator]] = {"total": Accumulator(), "weight": Accumulator()}

    def measure_on_rank(self, step: Step) -> MetricTotals:
        """Return nats and weights on this rank, 0-dimensional, or {} on ranks without the last stage."""
        losses = read_losses_on_last_stage(step)
        return (
            {}
            if losses is None
            else {"total": sum_scalar_over_microbatches(losses, self.of), "weight": sum_weights(losses)}
        )

    def compute(self, totals: MetricTotals, step: Step) -> MetricValues:
        """Return the values, None without tokens or if infinite."""
        values: dict[str, Value] = {"perplexity": _exp_or_none(float(totals["total"] / totals["weight"]))}
        if (name := f"validation_{self.of}") in step.state:
            values["validation_perplexity"] = _exp_or_none(step.state.number(name))
        return values


def _exp_or_none(nats: float) -> float | None:
    """Return exp(nats), or None if it is not finite."""
    return math.exp(nats) if nats < MAX_NATS else None  # NaN is not less
