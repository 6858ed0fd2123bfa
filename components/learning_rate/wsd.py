"""Warm-up, stable, decay (Hu et al. 2024, "MiniCPM", arXiv 2404.06395, section 4.2)."""

from drawloom.components.learning_rate.lengths import steps_of
from drawloom.components.learning_rate.piecewise import Curve, between
from drawloom.components.learning_rate.warmup import AfterWarmup
from drawloom.graph import at_least, component, setting
from drawloom.graph import between as within


@component(writes=("lr_factor",))
class WarmupStableDecay(AfterWarmup):
    """
    After a warm-up the base learning rate, until it falls in the last steps, to `end` after the last one.

    A run that was stopped before the decay may go on for more steps, since nothing before it depends on their number.
    """

    decay_steps: int | None = setting(default=None, check=at_least(0), doc="steps of the decay")
    decay_tokens: int | None = setting(
        default=None, check=at_least(0), doc="the same as a number of tokens, counted in full rows"
    )
    decay_percent: float | None = setting(
        default=None, check=within(0, 100), doc="the same as a share of all steps; there is none if all are left out"
    )
    curve: Curve = setting(default="linear", doc="how it falls")
    end: float = setting(default=0.0, check=at_least(0), doc="the factor at the end")

    def after(self, done: int, rest: int, total: int) -> float:
        """1, or the value of the curve."""
        steps = steps_of(
            self.decay_steps, self.decay_tokens, self.decay_percent, total=total, sizes=self.sizes, at_end=True
        )
        falling = min(steps, rest)
        into = done - (rest - falling)
        return 1.0 if into <= 0 else between(self.curve, 1.0, self.end, min(into / falling, 1.0))
