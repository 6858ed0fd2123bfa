"""
ZB1P, also ZB-H1: 1F1B with split backwards, whose weight gradients fill bubbles of 1F1B.

Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2; with several stages on each rank, its
interleaved form. Rank r defers r weight gradients, so that every rank holds as much as rank 0 of 1F1B.
"""

from drawloom.components.pipeline.program.builders import Row, RowSchedule, backward_input, interleaved, loop
from drawloom.graph import between, component, setting


@component(impact="safe")
class ZeroBubble1P(RowSchedule):
    """1F1B with split backwards (ZB-H1), plain or interleaved; as much memory, a third of the bubble."""

    stages_per_rank: int = setting(default=1, check=between(1, 1001), doc="stages on each rank")

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return loop(ranks, self.stages_per_rank)

    def row(self, rank: int, ranks: int, microbatches: int) -> Row:
        """The op codes of one rank, in order."""
        return interleaved(rank, ranks, self.stages_per_rank, microbatches, backward_input, lead=1, lag=rank)
