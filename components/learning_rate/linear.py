"""Linear learning rate decay."""

from drawloom import at_least, component, setting
from drawloom.components.learning_rate.piecewise import interpolate
from drawloom.components.learning_rate.warmup import AfterWarmup


@component(writes=("lr_factor",))
class LinearDecay(AfterWarmup):
    """Linear decay: after a warm-up the factor falls linearly, to `end` after the last step."""

    end: float = setting("learning-rate multiplier after the last step", default=0.0, check=at_least(0))

    def factor_after_warmup(self, steps_done: int, steps_after_warmup: int, total: int) -> float:
        """Return the linear decay from 1 to `end` at `steps_done`."""
        return interpolate("linear", 1.0, self.end, min(steps_done / steps_after_warmup, 1.0))
