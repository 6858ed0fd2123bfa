"""Linear learning rate decay."""

from drawloom import component
from drawloom.components.learning_rate.warmup import DecayToEnd


@component(writes=("lr_factor",))
class LinearDecay(DecayToEnd):
    """Linear decay: after a warm-up the factor falls linearly, to `end` after the last step."""

    curve = "linear"
