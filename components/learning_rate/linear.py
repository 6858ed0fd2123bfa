"""A learning rate that falls in a line."""

from drawloom.components.learning_rate.piecewise import between
from drawloom.components.learning_rate.warmup import AfterWarmup
from drawloom.graph import at_least, component, setting


@component(writes=("lr_factor",))
class LinearDecay(AfterWarmup):
    """After a warm-up the factor falls in a line, and is `end` after the last step."""

    end: float = setting(default=0.0, check=at_least(0), doc="the factor at the end")

    def after(self, done: int, rest: int, total: int) -> float:
        """The value of the line."""
        return between("linear", 1.0, self.end, min(done / rest, 1.0))
