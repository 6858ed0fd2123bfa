"""
1F1B: a rank warms up with a forward pass per later rank, then alternates one forward and one backward pass.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.2, in the form
that flushes in every step ("PipeDream-Flush", Narayanan et al., ICML 2021). Rank r of p keeps at most p - r
microbatches. With twice the warm-up, rank r keeps 2 (p - r) - 1, and no rank waits for messages that take at most as
long as a forward pass.
"""

from drawloom import component, setting
from drawloom.components.pipeline.program.builders import B0, F0, OpCodes, OpCodeSchedule


@component(impact="safe")
class OneFOneB(OpCodeSchedule):
    """1F1B (PipeDream-Flush): one forward, one backward; on one rank, the plain training loop."""

    hide_latency: bool = setting("double the warm-up, to hide the latency of messages", default=False)

    def build_rank_op_codes(self, rank: int, ranks: int, microbatches: int) -> OpCodes:
        lead = 2 if self.hide_latency else 1
        warmup = min(lead * (ranks - 1 - rank), microbatches)
        return [F0] * warmup + [F0, B0] * (microbatches - warmup) + [B0] * warmup
