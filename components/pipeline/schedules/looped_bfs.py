"""
Looped breadth-first: GPipe with several stages on every rank, one after another for all microbatches.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023. The bubble of GPipe is divided by the number of stages
on a rank; every rank keeps the activations of all microbatches.
"""

from typing import ClassVar

from drawloom.components.pipeline.program.builders import (
    Row,
    RowSchedule,
    assign_stages_in_loop,
    build_breadth_first_row,
)
from drawloom.graph import between, component, setting


@component(impact="safe")
class LoopedBreadthFirst(RowSchedule):
    """Looped breadth-first: all microbatches through one stage after another, then all backward."""

    newest_first: ClassVar[bool] = True
    stages_per_rank: int = setting(default=2, check=between(1, 1001), doc="stages per rank")

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        return assign_stages_in_loop(ranks, self.stages_per_rank)

    def build_row(self, rank: int, ranks: int, microbatches: int) -> Row:
        return build_breadth_first_row(self.stages_per_rank, microbatches)
