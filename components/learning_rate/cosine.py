"""Learning rate that falls like half a cosine (Loshchilov and Hutter 2017, "SGDR", arXiv 1608.03983, equation 5)."""

from drawloom import at_least, component, setting
from drawloom.components.learning_rate.piecewise import interpolate
from drawloom.components.learning_rate.warmup import AfterWarmup


@component(writes=("lr_factor",))
class Cosine(AfterWarmup):
    """Cosine decay: after a warm-up the factor falls like half a cosine, to `end` after the last step."""

    end: float = setting("learning-rate multiplier after the last step", default=0.0, check=at_least(0))

    def factor_after_warmup(self, steps_done: int, steps_after_warmup: int, total: int) -> float:
        """Return the half cosine from 1 to `end` at `steps_done`."""
        return interpolate("cosine", 1.0, self.end, min(steps_done / steps_after_warmup, 1.0))
