"""
Looped breadth-first: as GPipe, but with several stages on each rank, through which all microbatches go one by one.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023. The bubble is that of GPipe divided by the number of
stages on a rank; every rank holds all microbatches.
"""

from typing import ClassVar

from drawloom.components.pipeline.program.builders import Row, RowSchedule, breadth_first, loop
from drawloom.graph import between, component, setting


@component(impact="safe")
class LoopedBreadthFirst(RowSchedule):
    """All microbatches through one stage after another, then all backward."""

    newest_first: ClassVar[bool] = True
    stages_per_rank: int = setting(default=2, check=between(1, 1001), doc="stages on each rank")

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return loop(ranks, self.stages_per_rank)

    def row(self, rank: int, ranks: int, microbatches: int) -> Row:
        """The op codes of one rank, in order."""
        return breadth_first(self.stages_per_rank, microbatches)
