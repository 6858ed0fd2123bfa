"""New random order of rows in every epoch."""

from typing import TYPE_CHECKING

import numpy as np

from drawloom import component, internal
from drawloom.ports import RowSource, RunInfo

if TYPE_CHECKING:
    from drawloom.components.data.order.permutation import Permutation


@component
class Shuffled:
    """Random permutation of a source's rows, determined by (seed, source, epoch)."""

    job: RunInfo
    _last: "dict[str, Permutation]" = internal(factory=dict)

    def rows_at(self, source: RowSource, epoch: int, positions: np.ndarray) -> np.ndarray:
        from drawloom.components.data.order.permutation import Permutation

        permutation = Permutation(self.job.seed, f"rows {source.name}".strip(), epoch, source.rows)
        # cache the last permutation of a source: positions arrive in order, and sorting is done once per permutation
        if self._last.get(source.name) != permutation:
            self._last[source.name] = permutation
        return self._last[source.name].get_items_at(positions)
