"""Warmup-stable-decay schedule, WSD (Hu et al. 2024, "MiniCPM", arXiv 2404.06395, section 4.2)."""

from drawloom import at_least, component, setting
from drawloom import between as within
from drawloom.components.learning_rate.lengths import convert_length_to_steps
from drawloom.components.learning_rate.piecewise import Curve, interpolate
from drawloom.components.learning_rate.warmup import AfterWarmup


@component(writes=("lr_factor",))
class WarmupStableDecay(AfterWarmup):
    """
    WSD schedule: a warm-up, the base learning rate, and a decay in the last steps to `end` after the last step.

    A run stopped before the decay may continue with more steps, because the factors before the decay do not depend on
    the step count.
    """

    decay_steps: int | None = setting("decay length in steps", default=None, check=at_least(0), one_of="decay")
    decay_tokens: int | None = setting(
        "decay length in tokens, counted in full rows", default=None, check=at_least(0), one_of="decay"
    )
    decay_percent: float | None = setting(
        "decay length as a percentage of all steps; without any length there is no decay",
        default=None,
        check=within(0, 100),
        one_of="decay",
    )
    curve: Curve = setting("decay curve", default="linear")
    end: float = setting("learning-rate multiplier after the last step", default=0.0, check=at_least(0))

    def factor_after_warmup(self, steps_done: int, steps_after_warmup: int, total: int) -> float:
        """Return 1 before the decay, and then the curve's value."""
        steps = convert_length_to_steps(
            self.decay_steps,
            self.decay_tokens,
            self.decay_percent,
            total=total,
            sizes=self.run_token_counts,
            at_end=True,
        )
        length = min(steps, steps_after_warmup)
        position = steps_done - (steps_after_warmup - length)
        return 1.0 if position <= 0 else interpolate(self.curve, 1.0, self.end, min(position / length, 1.0))
