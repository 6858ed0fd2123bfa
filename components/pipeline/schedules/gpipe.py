"""
GPipe: forwards of all microbatches, then all backwards, the newest microbatch first.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019, figure 2c.
Every rank holds all microbatches.
"""

from drawloom.components.pipeline.program.builders import B0, F0, build_program, loop
from drawloom.components.ports.program import Program
from drawloom.graph import component


@component(impact="safe")
class GPipe:
    """All forwards, then all backwards."""

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return loop(ranks)

    def program(self, ranks: int, microbatches: int) -> Program:
        """The actions of every rank, in order."""
        row = [F0] * microbatches + [B0] * microbatches
        return build_program([row] * ranks, self.stage_to_rank(ranks), microbatches, newest_first=True)
