"""
Which pairs of tokens attention looks at in rows of documents, and which of them by a kernel for packed rows.

Documents end where chance has it, after any token as likely as after another: packings cut and place them so that this
is close. Then two tokens have a document in common with a probability that falls with their distance.
"""

import math
from collections.abc import Mapping

import attrs
import numpy as np

from drawloom.components.ports.flops import ForwardFlops


@attrs.frozen
class Rows:
    """The rows of a microbatch, of `length` tokens, in documents of `document` tokens in mean; each is one if inf."""

    count: int
    length: int
    document: float = math.inf

    @property
    def _goes_on(self) -> float:
        """The probability that a token is of the document of the one before it."""
        return 1 - 1 / self.document

    def pairs(self, window: int | None = None) -> float:
        """The pairs of a query and a key that it sees, of a row."""
        distances = np.arange(self.length if window is None else min(window, self.length))
        return float(((self.length - distances) * self._goes_on**distances).sum())

    @property
    def whole(self) -> float:
        """The probability that each row is one document."""
        return self._goes_on ** (self.count * (self.length - 1))


@attrs.frozen
class Attended:
    """The part of all pairs of tokens of rows that attention looks at, and of these that for packed rows' kernel."""

    pairs: float = 1.0
    packed: float = 0.0


def attended(counted: ForwardFlops | None, rows: Rows, whole_rows: float) -> Attended:
    """
    Those of a model, causally, inside of documents and within windows, by layer.

    `whole_rows` is how probable it is that layers without windows have a kernel for rows of one document each.
    """
    per_pair: Mapping[int | None, float] = counted.per_pair if counted is not None and counted.per_pair else {None: 1.0}
    seen = sum(flops * rows.pairs(window) for window, flops in per_pair.items())
    whole = per_pair.get(None, 0.0) * whole_rows * Rows(rows.count, rows.length).pairs()
    return Attended(seen / sum(per_pair.values()) / rows.length**2, 1 - whole / seen)
