"""A learning rate that falls with the square root of the steps (Vaswani et al. 2017, arXiv 1706.03762, section 5.3)."""

from typing import Any

from drawloom.components.learning_rate.warmup import AfterWarmup
from drawloom.graph import at_least, component, setting


@component(writes=("lr_factor",))
class InverseSqrt(AfterWarmup):
    """After a warm-up the factor is 1 / sqrt(1 + steps since then / timescale)."""

    timescale: int | None = setting(
        default=None, check=at_least(1), doc="steps; those of the warm-up if left out, or 10,000 without one"
    )

    def after(self, done: int, rest: int, total: int) -> float:
        """The value of the root."""
        scale = self.timescale or self.warmup(total) or 10_000
        return float((1 + done / scale) ** -0.5)

    @classmethod
    def derives_from_total(cls, node: Any) -> bool:
        """Only if the warm-up is a share of all steps."""
        return node.settings["warmup_percent"] is not None
