"""The validation split: the same rows at every evaluation, each on one data-parallel rank."""

import logging
from collections.abc import Iterator

from drawloom.components.ports.data import PackedDataset
from drawloom.components.ports.run import Batching
from drawloom.components.state.batch import Batch
from drawloom.graph import at_least, component, setting

log = logging.getLogger("drawloom.run")


@component(impact="safe")
class Validation:
    """Some validation rows, evenly spread over the split, the same for every mesh."""

    rows: PackedDataset
    batching: Batching
    rows_used: int = setting(
        default=64, impact="safe", check=at_least(1), doc="validation rows to evaluate; all, if there are fewer"
    )

    def open(self) -> None:
        """Log it if there are no rows: a corpus may hold nothing out."""
        if self.rows.count("validation") == 0:
            log.info("the validation split is empty, so there is no evaluation")

    def row_counts(self) -> tuple[int, int]:
        """How many rows all ranks evaluate together, and how many the validation split has."""
        return len(self.row_indices()), self.rows.count("validation")

    def batches(self) -> Iterator[Batch]:
        """
        This data-parallel rank's microbatches: over all ranks, every row once, and as many microbatches on each.

        A rank that has fewer rows than others gets some without weight, as it takes part in gathering what is sharded.
        """
        every, size = self.row_indices(), self.batching.micro_size
        mine = every[self.batching.dp_rank :: self.batching.dp_size]
        most = -(-len(every) // self.batching.dp_size)
        for start in range(0, most, size):
            rows = mine[start : start + size]
            batch = self.rows.batch("validation", rows or every[:1])
            yield batch if rows else batch.without_weights()

    def row_indices(self) -> list[int]:
        """The indices of the evaluated rows, in order."""
        available = self.rows.count("validation")
        # evenly spaced: neighbouring rows are often of one document
        used = min(self.rows_used, available)
        return [index * available // used for index in range(used)]
