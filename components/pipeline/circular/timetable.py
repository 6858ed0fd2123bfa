"""
Circular pipeline timetable: every stage's microbatch and repeat in every iteration.

Source: MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`; layers are
assigned to ranks as in looped pipelines (Lamy-Poirier 2022, arXiv 2211.05953).

Block `repeat * stages + stage` belongs to `stage`, so the last stage's output reenters at the first stage until it has
passed all repeats. All stages step together. An item is a microbatch in a repeat. Stage 0 processes the next item in
every iteration, beginning with the first repeat's microbatches. Every later stage lags by the latency: one iteration,
or two if outputs travel while the next iteration computes. So iteration and stage determine the item; a stage without
an item is in the pipeline's bubble.

All stages have equally many slots for inputs and outputs, their columns. If there are fewer microbatches than slots,
the last slots are empty: their iterations are idle and take no time.
"""

import attrs


@attrs.frozen
class Item:
    """Work for a stage in one iteration: a microbatch in a repeat."""

    microbatch: int
    repeat: int


@attrs.frozen
class Timetable:
    """
    Iterations of a circular pipeline. A microbatch runs in the next stage `latency` iterations later, 1 or 2.

    Raises ValueError for numbers below 1 and for another latency.
    """

    stages: int
    microbatches: int
    repeats: int = 1
    latency: int = 1

    def __attrs_post_init__(self) -> None:
        if min(self.stages, self.microbatches, self.repeats) < 1 or self.latency not in (1, 2):
            raise ValueError(f"stages, microbatches and repeats are at least 1, and latency is 1 or 2: {self}")

    @property
    def column_count(self) -> int:
        """Columns of a stage's `state_io`, one per input, and later per output."""
        return max(-(-self.microbatches // self.stages), self.latency)

    @property
    def slot_count(self) -> int:
        """Slots in the columns on all stages: the most microbatches that fit."""
        return self.column_count * self.stages

    @property
    def iteration_count(self) -> int:
        """Iterations until the last output has arrived in `state_io`."""
        return self.slot_count * self.repeats + self.latency * (self.stages - 1)

    @property
    def uses_circ_storage(self) -> bool:
        """Return whether reentering outputs wait in `circ_storage`, because stage 0 needs them later."""
        return self.repeats > 1 and self.slot_count > self.stages * self.latency

    def get_microbatches_stored_on_stage(self, stage: int) -> range:
        """Return the microbatches whose inputs a stage has at the start, and whose outputs it has at the end."""
        first = min(stage * self.column_count, self.microbatches)
        return range(first, min(first + self.column_count, self.microbatches))

    def find_item(self, iteration: int, stage: int) -> Item | None:
        """Return a stage's item in an iteration, or None in the bubble and for an empty slot."""
        repeat, microbatch = divmod(iteration - self.latency * stage, self.slot_count)
        return Item(microbatch, repeat) if 0 <= repeat < self.repeats and microbatch < self.microbatches else None

    def find_reentering_item(self, iteration: int) -> Item | None:
        """Return the item leaving the last stage in an iteration with repeats left, or None."""
        item = self.find_item(iteration, self.stages - 1)
        return item if item is not None and item.repeat < self.repeats - 1 else None

    def find_finished_microbatch(self, iteration: int) -> int | None:
        """Return the microbatch leaving the last stage in an iteration after its last repeat, or None."""
        item = self.find_item(iteration, self.stages - 1)
        return item.microbatch if item is not None and item.repeat == self.repeats - 1 else None

    def find_moved_microbatch(self, iteration: int, stage: int) -> int | None:
        """
        Return the microbatch whose tensor a stage passes from its `state_io` to the stage before it, or None.

        An iteration moves one column, and every column moves once in `column_count` iterations. The slots filled before
        the first iteration contain inputs, on their way to stage 0. Outputs follow them from the last stage, with empty
        slots until the first item has finished all repeats.
        """
        entered = iteration - (self.stages - stage) * self.column_count
        if entered >= 0:
            return self.find_finished_microbatch(entered)
        microbatch = self.slot_count + entered
        return microbatch if microbatch < self.microbatches else None

    def find_state_io_output_column(self, index_in_stage: int) -> int:
        """Return the `state_io` column in which a stage's n-th output ends up; `index_in_stage` is n, from 0."""
        return (index_in_stage + self.latency * (self.stages - 1)) % self.column_count
