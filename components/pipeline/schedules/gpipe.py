"""
GPipe: all forward passes, then all backward passes, the newest microbatch first.

Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019, figure 2c.
Every rank keeps the activations of all microbatches.
"""

from typing import ClassVar

from drawloom import component
from drawloom.components.pipeline.program.builders import B0, F0, OpCodes, OpCodeSchedule


@component(impact="safe")
class GPipe(OpCodeSchedule):
    """GPipe: all forward passes, then all backward passes."""

    backward_newest_first: ClassVar[bool] = True

    def build_rank_op_codes(self, rank: int, ranks: int, microbatches: int) -> OpCodes:
        return [F0] * microbatches + [B0] * microbatches
