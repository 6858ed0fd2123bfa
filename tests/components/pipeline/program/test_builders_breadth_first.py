"""Breadth first."""

from drawloom.components.pipeline.program.builders import backward, breadth_first, forward


def test_stages_run_one_after_another_and_back() -> None:
    """All microbatches run through one stage, then through the next; backwards are in reverse order."""
    assert breadth_first(2, 2) == [forward(0)] * 2 + [forward(1)] * 2 + [backward(1)] * 2 + [backward(0)] * 2
