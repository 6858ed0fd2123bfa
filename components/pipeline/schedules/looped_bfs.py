"""
Looped breadth-first: as GPipe, but with several stages on each rank, through which all microbatches go one by one.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023. The bubble is that of GPipe divided by the number of
stages on a rank; every rank holds all microbatches.
"""

from drawloom.components.pipeline.program.builders import breadth_first, loop
from drawloom.components.ports.program import Program
from drawloom.graph import at_least, component, setting


@component(impact="safe")
class LoopedBreadthFirst:
    """All microbatches through one stage after another, then all backward."""

    stages_per_rank: int = setting(default=2, check=at_least(1), doc="stages on each rank")

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return loop(ranks, self.stages_per_rank)

    def program(self, ranks: int, microbatches: int) -> Program:
        """The actions of every rank, in order."""
        return breadth_first(self.stage_to_rank(ranks), ranks, microbatches)
