"""Perplexity, exp(loss)."""

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from drawloom.components.metrics.named_sums import losses_of, total_of, weight_of
from drawloom.components.ports.run import Accumulator, Step, Value
from drawloom.graph import component, setting

MAX_NATS = 700.0  # exp of more overflows float64


@component(impact="safe")
class Perplexity:
    """`perplexity`, exp(mean cross entropy per token), and `validation_perplexity` if a step evaluates."""

    of: str = setting(default="cross_entropy", doc="name of the loss's cross entropy sum, in nats")

    accumulators: ClassVar[Mapping[str, Accumulator]] = {"total": Accumulator(), "weight": Accumulator()}

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """Return nats and weights on this rank, 0-dimensional, or {} on ranks without the last stage."""
        losses = losses_of(step)
        return {} if losses is None else {"total": total_of(losses, self.of), "weight": weight_of(losses)}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """Return the values, None without tokens or if infinite."""
        values: dict[str, Value] = {"perplexity": _finite_exp(float(totals["total"] / totals["weight"]))}
        if "validation_loss" in step.state:
            values["validation_perplexity"] = _finite_exp(step.state.number("validation_loss"))
        return values


def _finite_exp(nats: float) -> float | None:
    """Return exp(nats), or None if it is not finite."""
    return math.exp(nats) if nats < MAX_NATS else None  # NaN is not less
