"""A constant learning rate."""

from typing import ClassVar

from drawloom import component
from drawloom.components.learning_rate.warmup import AfterWarmup


@component(writes=("lr_factor",))
class Constant(AfterWarmup):
    """Constant learning rate after an optional warm-up."""

    has_fixed_end: ClassVar[bool] = False

    def factor_after_warmup(self, steps_done: int, steps_after_warmup: int, total: int) -> float:
        """Return 1."""
        return 1.0
