"""Breadth first."""

from drawloom.components.pipeline.program.builders import build_breadth_first_op_codes, encode_op
from drawloom.components.ports.program import BACKWARD, FORWARD


def test_stages_run_one_after_another_and_back() -> None:
    """All microbatches run through one stage, then through the next; backwards are in reverse order."""
    assert (
        build_breadth_first_op_codes(2, 2)
        == [encode_op(FORWARD, 0)] * 2
        + [encode_op(FORWARD, 1)] * 2
        + [encode_op(BACKWARD, 1)] * 2
        + [encode_op(BACKWARD, 0)] * 2
    )
