"""
DualPipeV: two stages on each rank, laid in a V, where the forward of one overlaps the backward of the other.

DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1 and figure 5 (DualPipe); cut in half at its axis of
symmetry by Sea AI Lab, as in DeepSeek's `dualpipev.py`, whose eight steps are the eight lines of
`_build_untrimmed_op_codes`.
"""

from typing import ClassVar

from drawloom import component
from drawloom.components.pipeline.program.builders import (
    B0,
    B1,
    F0,
    F1,
    I0,
    I1,
    OpCodes,
    OpCodeSchedule,
    W,
    overlap_op_codes,
)


@component(impact="safe")
class DualPipeV(OpCodeSchedule):
    """DualPipeV: forward passes overlap backward passes, on a V."""

    in_vee: ClassVar[bool] = True

    def build_rank_op_codes(self, rank: int, ranks: int, microbatches: int) -> OpCodes:
        # The eight steps need 2 * ranks microbatches; build_program drops the surplus.
        return _build_untrimmed_op_codes(rank, ranks, max(microbatches, 2 * ranks))


def _build_untrimmed_op_codes(rank: int, ranks: int, microbatches: int) -> OpCodes:
    """Return a rank's op codes for at least 2 * `ranks` microbatches."""
    half = rank + 1
    steady = [*overlap_op_codes(F0, B1), *overlap_op_codes(F1, B0)] * (microbatches - 2 * ranks + half)
    if rank == ranks - 1:
        steady[:2] = [F0, B1]  # the bubble is smaller without this overlap
    return (
        [F0] * (2 * (ranks - rank - 1))
        + [F0, F1] * (rank + 1)
        + [I1, W, F1] * (ranks - rank - 1)
        + steady
        + [B1, *overlap_op_codes(F1, B0)] * (ranks - rank - 1)
        + ([B1, B0] * half)[:half]
        + ([I1, I0] * half)[half:]
        + [W, I0] * (ranks - rank - 1)
        + [W] * (rank + 1)
    )
