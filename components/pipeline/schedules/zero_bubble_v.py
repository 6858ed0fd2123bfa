"""
ZBV: two stages per rank, placed in a V, with split backward passes; no bubble, in the memory of 1F1B.

Qi, Wan, Huang and Lin, "Zero Bubble Pipeline Parallelism", ICLR 2024, section 6. If forward, input gradients and weight
gradients cost the same and there are 2 p - 1 microbatches or more, no rank waits between its first action and its last.
"""

from typing import ClassVar

from drawloom import component
from drawloom.components.pipeline.program.builders import F0, F1, I0, I1, W0, W1, OpCodes, OpCodeSchedule


@component(impact="safe")
class ZeroBubbleV(OpCodeSchedule):
    """ZBV: zero bubble on a V, in the memory of 1F1B."""

    in_vee: ClassVar[bool] = True

    def build_rank_op_codes(self, rank: int, ranks: int, microbatches: int) -> OpCodes:
        # The op codes below need 2 p - 1 microbatches; build_program drops the surplus.
        return _build_untrimmed_op_codes(rank, ranks, max(microbatches, 2 * ranks - 1))


def _build_untrimmed_op_codes(rank: int, ranks: int, microbatches: int) -> OpCodes:
    """Return the op codes of rank r of p, for m microbatches, at least 2 p - 1."""
    return (
        [F0] * (2 * (ranks - rank) - 1)
        + [F1, F0] * rank
        + [F1, I1, W1] * (ranks - rank)
        + [F0, I0, W0, F1, I1, W1] * (microbatches - (2 * ranks - 1 - rank))
        + [I0, W0, F1, I1, W1] * (ranks - 1 - rank)
        + [I0, I1] * rank
        + [I0, W0] * (ranks - rank)
        + [W1] * rank
        + [W0] * rank
    )
