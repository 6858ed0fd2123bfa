"""Validation split: the same rows at every evaluation, partitioned over the data-parallel ranks."""

from collections.abc import Iterator

from drawloom import at_least, component, setting
from drawloom.ports import Batch, Batching, PackedDataset, run_log


@component(impact="safe")
class Validation:
    """Fixed validation row sample, evenly spaced over the split, the same for every mesh."""

    rows: PackedDataset
    batching: Batching
    rows_used: int = setting("maximum validation row count", default=64, impact="safe", check=at_least(1))

    def open(self) -> None:
        """Log that there is no evaluation if the corpus has no validation rows."""
        if self.rows.count_rows("validation") == 0:
            run_log.info("the validation split is empty, so there is no evaluation")

    def count_evaluated_and_total_rows(self) -> tuple[int, int]:
        """Count the evaluated rows over all ranks, and all validation rows."""
        return len(self.choose_row_indices()), self.rows.count_rows("validation")

    def batches(self) -> Iterator[Batch]:
        """
        Yield this data-parallel rank's microbatches; every row is in one microbatch on one rank.

        All ranks yield equally many microbatches, because every forward pass gathers sharded parameters
        (FSDP). A rank with fewer rows yields rows without weights instead.
        """
        indices, size = self.choose_row_indices(), self.batching.micro_size
        own_indices = indices[self.batching.dp_rank :: self.batching.dp_size]
        largest_share = -(-len(indices) // self.batching.dp_size)
        for start in range(0, largest_share, size):
            chosen = own_indices[start : start + size]
            batch = self.rows.batch("validation", chosen or indices[:1])
            yield batch if chosen else batch.with_zero_weights()

    def choose_row_indices(self) -> list[int]:
        """Return the evaluated rows' sorted numbers."""
        available = self.rows.count_rows("validation")
        # evenly spaced, because neighbouring rows often share a document
        used = min(self.rows_used, available)
        return [index * available // used for index in range(used)]
