"""Perplexity: e to the power of the loss."""

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from drawloom import above, component, setting
from drawloom.ports import Accumulator, Step, Value


@component(impact="safe")
class Perplexity:
    """Perplexity of the model: its uncertainty as a number of equally likely tokens, reported as `perplexity`."""

    maximum: float = setting("upper limit of the written value", default=1e6, check=above(1))

    accumulators: ClassVar[Mapping[str, Accumulator]] = {}

    def measure_on_rank(self, step: Step) -> Mapping[str, Tensor]:
        """Return no sums, because the step's loss already covers all ranks."""
        return {}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """Return the perplexity, or None in a step without a loss, such as a skipped step."""
        loss = step.state.get("loss")
        if loss is None:
            return {"perplexity": None}
        return {"perplexity": min(math.exp(min(float(loss), 700.0)), self.maximum)}
