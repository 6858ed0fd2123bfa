"""
ZB-H2: ZB-H1 with twice the warm-up, which fills the bubble at the front; ranks start and end one after another.

Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2. Rank r warms up with 2 (p - 1 - r)
forward passes and defers 2 r weight gradients, so that every rank keeps 2 p - 1 microbatches. No rank waits between its
first action and its last.
"""

from drawloom import component
from drawloom.components.pipeline.program.builders import OpCodes, OpCodeSchedule, build_interleaved_op_codes
from drawloom.ports import BACKWARD_INPUT


@component(impact="safe")
class ZeroBubbleH2(OpCodeSchedule):
    """ZB-H2: no bubble except the skew of the ranks' starts and ends, with nearly twice the memory of 1F1B."""

    def build_rank_op_codes(self, rank: int, ranks: int, microbatches: int) -> OpCodes:
        return build_interleaved_op_codes(
            rank, ranks, 1, microbatches, BACKWARD_INPUT, warmup_per_later_rank=2, weight_grad_lag=2 * rank
        )
