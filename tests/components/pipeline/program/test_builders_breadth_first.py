"""Breadth first."""

from drawloom.components.pipeline.program.builders import backward_code, build_breadth_first_row, forward_code


def test_stages_run_one_after_another_and_back() -> None:
    """All microbatches run through one stage, then through the next; backwards are in reverse order."""
    assert (
        build_breadth_first_row(2, 2)
        == [forward_code(0)] * 2 + [forward_code(1)] * 2 + [backward_code(1)] * 2 + [backward_code(0)] * 2
    )
