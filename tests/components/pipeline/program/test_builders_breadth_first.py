"""Breadth first."""

from drawloom.components.pipeline.program.builders import backward_op_code, forward_op_code
from drawloom.components.pipeline.program.interleaving import build_breadth_first_op_codes


def test_stages_run_one_after_another_and_back() -> None:
    """All microbatches run through one stage, then through the next; backwards are in reverse order."""
    assert (
        build_breadth_first_op_codes(2, 2)
        == [forward_op_code(0)] * 2 + [forward_op_code(1)] * 2 + [backward_op_code(1)] * 2 + [backward_op_code(0)] * 2
    )
