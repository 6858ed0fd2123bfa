"""Breadth first."""

from drawloom.components.pipeline.program.builders import breadth_first
from support.schedules import texts


def test_stage_by_stage_and_back() -> None:
    """All microbatches run through one stage, then through the next; backwards are in reverse order."""
    program = breadth_first((0, 1, 0, 1), 2, 2)
    assert texts(program.rank_program(1)) == ["1F0", "1F1", "3F0", "3F1", "3B1", "3B0", "1B1", "1B0"]
