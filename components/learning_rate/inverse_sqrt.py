"""Inverse square root decay of the learning rate (Vaswani et al. 2017, arXiv 1706.03762, section 5.3)."""

from typing import ClassVar

from drawloom import at_least, component, setting
from drawloom.components.learning_rate.warmup import AfterWarmup


@component(writes=("lr_factor",))
class InverseSqrt(AfterWarmup):
    """Inverse square root decay: after a warm-up the factor is 1 / sqrt(1 + steps since the warm-up / timescale)."""

    has_fixed_end: ClassVar[bool] = False

    timescale: int | None = setting(
        "timescale in steps; default: the warm-up steps, or 10,000 without warm-up", default=None, check=at_least(1)
    )

    def factor_after_warmup(self, steps_done: int, steps_after_warmup: int, total: int) -> float:
        """Return the inverse square root."""
        scale = self.timescale or self.count_warmup_steps(total) or 10_000
        return float((1 + steps_done / scale) ** -0.5)
