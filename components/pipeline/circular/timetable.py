"""
When each stage of a circular pipeline works on what: arithmetic alone.

Source: MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`; the circular assignment of layers
is that of looped pipelines (Lamy-Poirier 2022, arXiv 2211.05953).

Block `repeat * stages + stage` belongs to its stage, so that what leaves the last stage comes round to the first until
it has passed all repeats. All stages step together. Stage 0 takes the next of its items in every iteration, an item
being a microbatch in a repeat, first all microbatches of the first repeat; each following stage lags by one iteration,
or by two where what is handed over travels while the next iteration computes. So an item is known from iteration and
stage, and where there is none the stage is in the pipeline's bubble.
"""

import attrs


@attrs.frozen
class Item:
    """A microbatch on its way through a repeat."""

    microbatch: int
    repeat: int


@attrs.frozen
class Timetable:
    """
    The iterations of a circular pipeline; `hop` is how many of them it takes from a stage to the next, 1 or 2.

    Raises ValueError, with the numbers to write instead, where the numbers can't go together.
    """

    stages: int
    microbatches: int
    repeats: int = 1
    latency: int = 1

    def __attrs_post_init__(self) -> None:
        if min(self.stages, self.microbatches, self.repeats) < 1 or self.latency not in (1, 2):
            raise ValueError(f"there is no such pipeline: {self}")
        rounds, left = divmod(self.microbatches, self.stages)
        if left:
            fitting = f"{rounds * self.stages} or " if rounds >= self.latency else ""
            more = max(rounds + 1, self.latency) * self.stages
            raise ValueError(
                f"{self.microbatches} microbatches can't be dealt out to {self.stages} stages; write {fitting}{more}"
            )
        if rounds < self.latency:
            raise ValueError(
                f"{self.microbatches} microbatches are too few for {self.stages} stages and delayed forwarding, in "
                "which an output needs two iterations to the next stage; write "
                f"{self.latency * self.stages}, or no delay"
            )

    @property
    def columns(self) -> int:
        """How many inputs, and later outputs, lie at each stage."""
        return self.microbatches // self.stages

    @property
    def bubble(self) -> int:
        """The iterations that the pipeline needs beyond those in which stage 0 works."""
        return self.latency * (self.stages - 1)

    @property
    def iterations(self) -> int:
        """How many iterations there are."""
        return self.microbatches * self.repeats + self.bubble

    @property
    def bubble_fraction(self) -> float:
        """The part of all iterations in which a stage has nothing to do."""
        return self.bubble / self.iterations

    @property
    def stores(self) -> bool:
        """Whether what comes round waits in `circ_storage`, since stage 0 is not ready for it when it comes."""
        return self.repeats > 1 and self.microbatches > self.stages * self.latency

    def item(self, iteration: int, stage: int) -> Item | None:
        """What a stage works on in an iteration; None in the bubble."""
        number = iteration - self.latency * stage
        if not 0 <= number < self.microbatches * self.repeats:
            return None
        return Item(number % self.microbatches, number // self.microbatches)

    def comes_round(self, iteration: int) -> Item | None:
        """What leaves the last stage in an iteration, if it has repeats before it."""
        item = self.item(iteration, self.stages - 1)
        return item if item is not None and item.repeat < self.repeats - 1 else None

    def is_finished(self, iteration: int) -> bool:
        """Whether what leaves the last stage in an iteration has passed all repeats."""
        item = self.item(iteration, self.stages - 1)
        return item is not None and item.repeat == self.repeats - 1

    def is_wanted(self, iteration: int, stage: int) -> bool:
        """
        Whether what lies at a stage in the column that moves in an iteration is an input to come, or an output.

        A column moves up by one stage every `columns` iterations. What entered it at the last stage is an output of
        the pipeline if it had passed all repeats by then; what was there from the start is an input.
        """
        entered = iteration - (self.stages - stage) * self.columns
        return entered < 0 or self.is_finished(entered)

    def column(self, place: int) -> int:
        """In which column the output of a stage's microbatch of this place (from 0) lies at the end."""
        return (place + self.microbatches * (self.repeats - 1) + self.bubble) % self.columns
