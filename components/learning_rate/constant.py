"""A constant learning rate."""

from typing import Any

from drawloom.components.learning_rate.warmup import AfterWarmup
from drawloom.graph import component


@component(writes=("lr_factor",))
class Constant(AfterWarmup):
    """The base learning rate, after a warm-up if there is one."""

    def after(self, done: int, rest: int, total: int) -> float:
        """1."""
        return 1.0

    @classmethod
    def derives_from_total(cls, node: Any) -> bool:
        """Only if the warm-up is a share of all steps."""
        return node.settings["warmup_percent"] is not None
