"""Perplexity: e to the power of the loss."""

import math
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from drawloom import above, component, setting
from drawloom.ports import Accumulator, Step, Value


@component(impact="safe")
class Perplexity:
    """The number of tokens among which the model is undecided, as `perplexity`."""

    most: float = setting(default=1e6, check=above(1), doc="what is written down for all that is greater")

    accumulators: ClassVar[Mapping[str, Accumulator]] = {}

    def update(self, step: Step) -> Mapping[str, Tensor]:
        """Nothing to combine: the loss of a step is that of all ranks."""
        return {}

    def compute(self, totals: Mapping[str, Tensor], step: Step) -> Mapping[str, Value]:
        """None in a step without a loss, such as one that was skipped."""
        loss = step.state.get("loss")
        if loss is None:
            return {"perplexity": None}
        return {"perplexity": min(math.exp(min(float(loss), 700.0)), self.most)}
