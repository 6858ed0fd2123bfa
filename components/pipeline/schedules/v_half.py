"""
V-Half: half the memory of 1F1B, with a smaller bubble.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, section 3, allows p + 2 stages' activations on
each rank. The paper's repeated building block leaves bubbles of 3 p - 5 slots at the ends; list scheduling with the
same memory, for ops of equal cost, leaves 3 p - 7 (3 p - 6 if p is odd).
"""

from drawloom.components.pipeline.program.builders import vee
from drawloom.components.pipeline.program.list_scheduling import list_schedule
from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.ports.program import Program
from drawloom.graph import component


@component(impact="safe")
class VHalf:
    """Half the memory of 1F1B, for a small bubble (V-Half)."""

    @property
    def stages_per_rank(self) -> int:
        """Two: one on the way down the V, one on the way up."""
        return 2

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return vee(ranks)

    def program(self, ranks: int, microbatches: int) -> Program:
        """The actions of every rank, in order."""
        return list_schedule(ranks, microbatches, limit=ranks + 2, costs=Costs())
