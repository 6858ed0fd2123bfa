"""
Looped breadth-first: GPipe with several stages on every rank, one after another for all microbatches.

Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023. The bubble of GPipe is divided by the number of stages
on a rank; every rank keeps the activations of all microbatches.
"""

from typing import ClassVar

from drawloom import between, component, setting
from drawloom.components.pipeline.program.builders import OpCodes, OpCodeSchedule, build_breadth_first_op_codes


@component(impact="safe")
class LoopedBreadthFirst(OpCodeSchedule):
    """Looped breadth-first: all microbatches through one stage after another, then all backward."""

    backward_newest_first: ClassVar[bool] = True
    stages_per_rank: int = setting("stages per rank", default=2, check=between(1, 1001))

    def build_rank_op_codes(self, rank: int, ranks: int, microbatches: int) -> OpCodes:
        return build_breadth_first_op_codes(self.stages_per_rank, microbatches)
