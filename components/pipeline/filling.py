"""
Lines filled greedily: whenever a rank is free, it does the most urgent work that is ready and that its memory allows.

Stages lie on a V, two a rank. Urgent is what lets other ranks go on: the forward on the way up, then that on the way
down, then input gradients, those of the first stage before those of the second; weight gradients fill the gaps. The
first stage may not take all of the memory, or the way up would be blocked: its share falls evenly from all but one on
the first rank to half on the last one, as do the lifetimes of its activations.

All ranks are filled together, in time: nothing that starts now can end before the shortest work has passed, so all
ranks that are free within that time know all that they need to decide. Each round decides once for all of these.
"""

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from drawloom.components.pipeline.costs import Costs
from drawloom.components.pipeline.weaving import F0, F1, I0, I1, Row, W

_URGENCY = (F1, F0, I0, I1)
"""Letters by urgency; the rows of all that is kept by letter."""


def fill(ranks: int, microbatches: int, limit: int, costs: Costs) -> list[Row]:
    """
    Each rank's letters, for stages on a V. All costs but that of a message are above zero.

    A rank holds the activations of `limit` stage-microbatches at most, from their forwards to their weight gradients;
    two at least are needed.
    """
    filling = _Filling.of(ranks, microbatches, limit, costs)
    while filling.decide():
        pass
    return [letters[:count].tolist() for letters, count in zip(filling.letters, filling.count, strict=True)]
