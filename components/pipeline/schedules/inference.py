"""
Inference: forwards alone, all microbatches through one stage after another.

The forward half of the breadth-first pipeline (Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023), and
with one stage on each rank that of GPipe. Nothing is kept for a backward.
"""

from typing import ClassVar

from drawloom.components.pipeline.program.builders import breadth_first, loop
from drawloom.components.ports.program import Program
from drawloom.graph import at_least, component, setting


@component(impact="safe")
class Inference:
    """Forwards alone."""

    trains: ClassVar[bool] = False

    stages_per_rank: int = setting(default=1, check=at_least(1), doc="stages on each rank")

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return loop(ranks, self.stages_per_rank)

    def program(self, ranks: int, microbatches: int) -> Program:
        """The actions of every rank, in order."""
        return breadth_first(self.stage_to_rank(ranks), ranks, microbatches, train=False)
