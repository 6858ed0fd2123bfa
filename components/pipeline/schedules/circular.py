"""
The circular pipeline: microbatches pass through all ranks in a loop, one repeat after another.

MaxText (Google, github.com/AI-Hypercomputer/maxtext), `layers/pipeline.py`. One program for all ranks steps through
`repeats * microbatches + ranks - 1` iterations and goes back through them in reverse, as the looped breadth-first
pipeline with a stage on each rank for every repeat. `pipeline.circular.executor` runs it. Its stages are layers alone:
each rank has the embedding and the head, too, for its share of the microbatches, so that no rank waits for the head of
the last one.
"""

from typing import ClassVar

from drawloom.components.pipeline.program.builders import Row, RowSchedule, breadth_first, loop
from drawloom.graph import between, component, setting


@component(impact="safe")
class Circular(RowSchedule):
    """MaxText's circular pipeline: in each repeat all microbatches pass through all ranks once."""

    newest_first: ClassVar[bool] = True
    ends_on_every_rank: ClassVar[bool] = True
    stages_per_rank: int = setting(default=2, check=between(1, 1001), doc="repeats, each a stage on every rank")

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return loop(ranks, self.stages_per_rank)

    def row(self, rank: int, ranks: int, microbatches: int) -> Row:
        """The op codes of one rank, in order."""
        return breadth_first(self.stages_per_rank, microbatches)
