"""
The timetable of a circular pipeline: the microbatch and repeat of each stage in each iteration.

Source: MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`; the circular assignment of layers
is that of looped pipelines (Lamy-Poirier 2022, arXiv 2211.05953).

Block `repeat * stages + stage` belongs to `stage`, so the last stage's output reenters at the first stage until it has
passed all repeats. All stages step together. Stage 0 takes the next item in every iteration, an item being a microbatch
in a repeat, first all microbatches of the first repeat; each following stage lags by the latency: one iteration, or two
if outputs travel while the next iteration computes. So the item follows from iteration and stage; a stage without one
is in the pipeline's bubble.
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

    Raises ValueError, with numbers to write instead, if the numbers don't fit together.
    """

    stages: int
    microbatches: int
    repeats: int = 1
    latency: int = 1

    def __attrs_post_init__(self) -> None:
        if min(self.stages, self.microbatches, self.repeats) < 1 or self.latency not in (1, 2):
            raise ValueError(f"stages, microbatches and repeats are at least 1, and latency is 1 or 2: {self}")
        rounds, left = divmod(self.microbatches, self.stages)
        if left:
            fitting = f"{rounds * self.stages} or " if rounds >= self.latency else ""
            more = max(rounds + 1, self.latency) * self.stages
            raise ValueError(
                f"{self.microbatches} microbatches can't be divided evenly among {self.stages} stages; "
                f"write {fitting}{more}"
            )
        if rounds < self.latency:
            raise ValueError(
                f"{self.microbatches} microbatches are too few for {self.stages} stages and delayed forwarding, in "
                "which an output needs two iterations to the next stage; write "
                f"{self.latency * self.stages}, or no delay"
            )

    @property
    def columns(self) -> int:
        """The number of inputs, and later of outputs, that `state_io` holds for each stage."""
        return self.microbatches // self.stages

    @property
    def bubble(self) -> int:
        """The iterations of the pipeline in which stage 0 is idle."""
        return self.latency * (self.stages - 1)

    @property
    def iterations(self) -> int:
        """The number of iterations."""
        return self.microbatches * self.repeats + self.bubble

    @property
    def bubble_fraction(self) -> float:
        """The fraction of all iterations in which a stage is idle."""
        return self.bubble / self.iterations

    @property
    def uses_circ_storage(self) -> bool:
        """Whether reentering outputs wait in `circ_storage`, because stage 0 needs them later than they arrive."""
        return self.repeats > 1 and self.microbatches > self.stages * self.latency

    def item(self, iteration: int, stage: int) -> Item | None:
        """The item of a stage in an iteration; None in the bubble."""
        number = iteration - self.latency * stage
        if not 0 <= number < self.microbatches * self.repeats:
            return None
        return Item(number % self.microbatches, number // self.microbatches)

    def reenters(self, iteration: int) -> Item | None:
        """The item that leaves the last stage in an iteration and has further repeats to pass; else None."""
        item = self.item(iteration, self.stages - 1)
        return item if item is not None and item.repeat < self.repeats - 1 else None

    def is_finished(self, iteration: int) -> bool:
        """Whether an item leaves the last stage in this iteration that has passed all repeats."""
        item = self.item(iteration, self.stages - 1)
        return item is not None and item.repeat == self.repeats - 1

    def moves_up(self, iteration: int, stage: int) -> bool:
        """
        Whether the slot of `state_io` at this stage, in the column that moves in this iteration, holds a tensor.

        A column moves up by one stage every `columns` iterations. A slot from before the first iteration holds an
        input; one that entered at the last stage holds an output, if an item had passed all repeats by then.
        """
        entered = iteration - (self.stages - stage) * self.columns
        return entered < 0 or self.is_finished(entered)

    def column(self, place: int) -> int:
        """The column that holds the output of a stage's microbatch number `place` (from 0) at the end."""
        return (place + self.microbatches * (self.repeats - 1) + self.bubble) % self.columns
