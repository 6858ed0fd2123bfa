"""
V-Half: half the memory of 1F1B, at a bubble between its own and none.

Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, section 3, allows p + 2 stages' activations on
each rank. The building block repeated leaves gaps of 3 p - 5 slots at the ends; filled greedily in the same memory, for
work that all costs the same, the gaps are 3 p - 7 (3 p - 6 if p is odd).
"""

from drawloom.components.pipeline.program.builders import vee
from drawloom.components.pipeline.program.costs import Costs
from drawloom.components.pipeline.program.list_scheduling import list_schedule
from drawloom.components.ports.program import Program
from drawloom.graph import component


@component(impact="safe")
class VHalf:
    """Half the memory of 1F1B, for a small bubble (V-Half)."""

    @property
    def stages_per_rank(self) -> int:
        """Down the V and up again."""
        return 2

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """For each stage the rank that holds it."""
        return vee(ranks)

    def program(self, ranks: int, microbatches: int) -> Program:
        """What each rank computes, in order."""
        return list_schedule(ranks, microbatches, limit=ranks + 2, costs=Costs())
