"""
ZB1P, also ZB-H1: 1F1B with split backward passes, whose weight gradients fill the bubbles of 1F1B.

Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2; with several stages per rank, its
interleaved form. Rank r defers r weight gradients, so that every rank needs the memory of rank 0 in 1F1B.
"""

from drawloom import between, component, setting
from drawloom.components.pipeline.program.builders import OpCodes, OpCodeSchedule, build_interleaved_op_codes
from drawloom.ports import BACKWARD_INPUT


@component(impact="safe")
class ZeroBubble1P(OpCodeSchedule):
    """ZB-H1: 1F1B with split backward passes, plain or interleaved; the same memory, a third of the bubble."""

    stages_per_rank: int = setting("stages per rank", default=1, check=between(1, 1001))

    def build_rank_op_codes(self, rank: int, ranks: int, microbatches: int) -> OpCodes:
        return build_interleaved_op_codes(
            rank,
            ranks,
            self.stages_per_rank,
            microbatches,
            BACKWARD_INPUT,
            warmup_per_later_rank=1,
            weight_grad_lag=rank,
        )
