"""A constant learning rate."""

from typing import Any

from drawloom import component
from drawloom.components.learning_rate.warmup import AfterWarmup


@component(writes=("lr_factor",))
class Constant(AfterWarmup):
    """Constant learning rate after an optional warm-up."""

    def factor_after_warmup(self, steps_done: int, steps_after_warmup: int, total: int) -> float:
        """Return 1."""
        return 1.0

    @classmethod
    def depends_on_total_steps(cls, node: Any) -> bool:
        """Return whether the warm-up is a percentage."""
        return node.settings["warmup_percent"] is not None
