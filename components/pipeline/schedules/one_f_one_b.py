"""
1F1B: a rank warms up with as many forwards as there are ranks after it, then alternates one forward, one backward.

Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.2, in the form
that flushes each step ("PipeDream-Flush", Narayanan et al., ICML 2021). Rank r of p holds at most p - r microbatches.
Warming up with twice as many forwards, rank r holds 2 (p - r) - 1, and no rank waits for messages that take at most as
long as a forward.
"""

from drawloom.components.pipeline.program.builders import B0, F0, Row, RowSchedule, loop
from drawloom.graph import component, setting


@component(impact="safe")
class OneFOneB(RowSchedule):
    """One forward, one backward (PipeDream-Flush); on one rank, the plain training loop."""

    hide_latency: bool = setting(default=False, doc="twice the warm-up, so that messages have time on their way")

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return loop(ranks)

    def row(self, rank: int, ranks: int, microbatches: int) -> Row:
        """The op codes of one rank, in order."""
        lead = 2 if self.hide_latency else 1
        warmup = min(lead * (ranks - 1 - rank), microbatches)
        return [F0] * warmup + [F0, B0] * (microbatches - warmup) + [B0] * warmup
