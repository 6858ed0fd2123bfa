"""The loss as a number of choices."""

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from drawloom.components.metrics.named_sums import losses_of, total_of, weight_of
from drawloom.components.ports.run import Accumulator, Step, Value
from drawloom.graph import component, setting

LARGEST = 700.0  # nats; exp of more is no float64


@component(impact="safe")
class Perplexity:
    """`perplexity`, exp of the mean cross entropy by token; and `validation_perplexity` where a step evaluates."""

    of: str = setting(default="cross_entropy", doc="the named sum of the loss that is a cross entropy in nats")

    accumulators: ClassVar[Mapping[str, Accumulator]] = {"total": Accumulator(), "weight": Accumulator()}

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """Nats and weights of this rank's microbatches, 0-dimensional; nothing on ranks without the last stage."""
        losses = losses_of(step)
        return {} if losses is None else {"total": total_of(losses, self.of), "weight": weight_of(losses)}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """None where there was no token; infinite ones are None, too."""
        values: dict[str, Value] = {"perplexity": _exp(float(totals["total"] / totals["weight"]))}
        if "validation_loss" in step.state:
            values["validation_perplexity"] = _exp(step.state.number("validation_loss"))
        return values


def _exp(nats: float) -> float | None:
    return math.exp(nats) if nats < LARGEST else None  # NaN is not less
