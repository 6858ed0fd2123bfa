"""Perplexity: e to the power of the loss."""

import math
from collections.abc import Mapping

from drawloom.components.ports.run import Step, Value
from drawloom.graph import above, component, setting


@component(impact="safe")
class Perplexity:
    """The number of tokens among which the model is undecided, as `perplexity`."""

    most: float = setting(default=1e6, check=above(1), doc="what is written down for all that is greater")

    def measure(self, step: Step) -> Mapping[str, Value]:
        """Nothing in a step without a loss, such as one that was refused."""
        loss = step.outputs.get("loss")
        if loss is None:
            return {"perplexity": None}
        return {"perplexity": min(math.exp(min(float(loss), 700.0)), self.most)}
