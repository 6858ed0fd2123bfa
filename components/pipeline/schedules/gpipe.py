"""
GPipe: forwards of all microbatches, then all backwards, the newest microbatch first.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019, figure 2c.
Every rank holds all microbatches.
"""

from typing import ClassVar

from drawloom.components.pipeline.program.builders import B0, F0, Row, RowSchedule, loop
from drawloom.graph import component


@component(impact="safe")
class GPipe(RowSchedule):
    """All forwards, then all backwards."""

    newest_first: ClassVar[bool] = True

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return loop(ranks)

    def row(self, rank: int, ranks: int, microbatches: int) -> Row:
        """The op codes of one rank, in order."""
        return [F0] * microbatches + [B0] * microbatches
