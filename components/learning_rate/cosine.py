"""Learning rate that falls like half a cosine (Loshchilov and Hutter 2017, "SGDR", arXiv 1608.03983, equation 5)."""

from drawloom import component
from drawloom.components.learning_rate.warmup import DecayToEnd


@component(writes=("lr_factor",))
class Cosine(DecayToEnd):
    """Cosine decay: after a warm-up the factor falls like half a cosine, to `end` after the last step."""

    curve = "cosine"
