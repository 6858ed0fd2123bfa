"""
Interleaved 1F1B: several stages on every rank, alternating one forward and one backward pass.

Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC 2021, section
2.2.2 and figure 4. The bubble of 1F1B is divided by the number of stages on a rank. Rounds of microbatches need not be
equal, so that any number of microbatches is possible.
"""

from drawloom import between, component, setting
from drawloom.components.pipeline.program.builders import OpCodes, OpCodeSchedule, build_interleaved_op_codes
from drawloom.ports import BACKWARD


@component(impact="safe")
class Interleaved1F1B(OpCodeSchedule):
    """Interleaved 1F1B: one forward, one backward, over several stages on every rank."""

    stages_per_rank: int = setting("stages per rank", default=2, check=between(1, 1001))

    def build_rank_op_codes(self, rank: int, ranks: int, microbatches: int) -> OpCodes:
        return build_interleaved_op_codes(
            rank, ranks, self.stages_per_rank, microbatches, BACKWARD, warmup_per_later_rank=2
        )
