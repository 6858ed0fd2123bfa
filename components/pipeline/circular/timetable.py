"""
The timetable of a circular pipeline: the microbatch and repeat of each stage in each iteration.

Source: MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`; the circular assignment of layers
is that of looped pipelines (Lamy-Poirier 2022, arXiv 2211.05953).

Block `repeat * stages + stage` belongs to `stage`, so the last stage's output reenters at the first stage until it has
passed all repeats. All stages step together. Stage 0 takes the next item in every iteration, an item being a microbatch
in a repeat, first all microbatches of the first repeat; each following stage lags by the latency: one iteration, or two
if outputs travel while the next iteration computes. So the item follows from iteration and stage; a stage without one
is in the pipeline's bubble.

Each stage has as many slots for inputs and outputs, its columns. Where there are fewer microbatches than slots, those
at the end are empty: the iterations in which they would be worked on are idle, and take no time.
"""

import attrs


@attrs.frozen
class Item:
    """A microbatch in a repeat."""

    microbatch: int
    repeat: int


@attrs.frozen
class Timetable:
    """
    The iterations of a circular pipeline; `latency` is their number from a stage to the next, 1 or 2.

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
    def columns(self) -> int:
        """The number of inputs, and later of outputs, that `state_io` holds for each stage."""
        return max(-(-self.microbatches // self.stages), self.latency)

    @property
    def slots(self) -> int:
        """The number of microbatches with which all columns would be full."""
        return self.columns * self.stages

    @property
    def iterations(self) -> int:
        """The number of iterations."""
        return self.slots * self.repeats + self.latency * (self.stages - 1)

    @property
    def uses_circ_storage(self) -> bool:
        """Whether reentering outputs wait in `circ_storage`, because stage 0 needs them later than they arrive."""
        return self.repeats > 1 and self.slots > self.stages * self.latency

    def share(self, stage: int) -> range:
        """The microbatches whose inputs a stage holds at the start, and whose outputs it holds at the end."""
        first = min(stage * self.columns, self.microbatches)
        return range(first, min(first + self.columns, self.microbatches))

    def item(self, iteration: int, stage: int) -> Item | None:
        """The item of a stage in an iteration; None in the bubble, and for an empty slot."""
        repeat, microbatch = divmod(iteration - self.latency * stage, self.slots)
        return Item(microbatch, repeat) if 0 <= repeat < self.repeats and microbatch < self.microbatches else None

    def reenters(self, iteration: int) -> Item | None:
        """The item that leaves the last stage in an iteration and has further repeats to pass; else None."""
        item = self.item(iteration, self.stages - 1)
        return item if item is not None and item.repeat < self.repeats - 1 else None

    def finished(self, iteration: int) -> int | None:
        """The microbatch that leaves the last stage in this iteration with all repeats passed; else None."""
        item = self.item(iteration, self.stages - 1)
        return item.microbatch if item is not None and item.repeat == self.repeats - 1 else None

    def moves_up(self, iteration: int, stage: int) -> int | None:
        """
        The microbatch in the slot of `state_io` at this stage, in the column that moves in this iteration, if any.

        A column moves up by one stage every `columns` iterations. A slot from before the first iteration holds an
        input; one that entered at the last stage holds an output, if an item had passed all repeats by then.
        """
        entered = iteration - (self.stages - stage) * self.columns
        if entered >= 0:
            return self.finished(entered)
        microbatch = self.slots + entered
        return microbatch if microbatch < self.microbatches else None

    def column(self, place: int) -> int:
        """The column that holds the output of a stage's microbatch number `place` (from 0) at the end."""
        return (place + self.latency * (self.stages - 1)) % self.columns
