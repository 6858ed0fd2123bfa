"""What a run is measured on: the same held-out rows every time, each on one replica."""

from collections.abc import Iterator

from drawloom.components.ports.data import Batch, PackedDataset
from drawloom.components.ports.run import Batching
from drawloom.graph import UserError, at_least, component, setting


@component(impact="safe")
class Validation:
    """Some held-out rows, evenly spread over the split, and the same for every layout of ranks."""

    rows: PackedDataset
    batching: Batching
    rows_used: int = setting(
        default=64, impact="safe", check=at_least(1), doc="held-out rows to measure on; all, if there are fewer"
    )

    def open(self) -> None:
        """No rows is a UserError."""
        if self.rows.count("validation") == 0:
            raise UserError("rows: the validation split is empty; increase `validation_fraction` in the corpus")

    def batches(self) -> Iterator[Batch]:
        """
        This replica's microbatches: every row once over all replicas.

        Replicas may have different numbers of them, even none.
        """
        mine = self.chosen()[self.batching.dp_rank :: self.batching.dp_size]
        size = self.batching.micro_size
        for start in range(0, len(mine), size):
            yield self.rows.batch("validation", mine[start : start + size])

    def chosen(self) -> list[int]:
        """The rows that are measured on, in order."""
        available = self.rows.count("validation")
        used = min(self.rows_used, available)
        return [index * available // used for index in range(used)]
