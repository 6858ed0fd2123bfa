"""Rows in a new random order in every epoch."""

import attrs
import numpy as np

from drawloom.components.data.order.permutation import Permutation
from drawloom.components.ports.data import RowSource
from drawloom.components.ports.run import RunInfo
from drawloom.graph import component


@component
class Shuffled:
    """A permutation by (seed, source, epoch)."""

    job: RunInfo
    _last: dict[str, Permutation] = attrs.field(init=False, factory=dict)

    def rows_at(self, source: RowSource, epoch: int, places: np.ndarray) -> np.ndarray:
        """The rows at these places of an epoch, int64 (places,)."""
        wanted = Permutation(self.job.seed, f"rows {source.name}".strip(), epoch, source.rows)
        # the last one of a source is kept, as places come in order and a permutation of few rows holds them sorted
        if self._last.get(source.name) != wanted:
            self._last[source.name] = wanted
        return self._last[source.name].at(places)
