"""Breadth first."""

from drawloom.components.pipeline.program.builders import breadth_first
from support.schedules import texts


def test_stage_by_stage_and_back() -> None:
    """All microbatches through one stage, then all through the next; backward all the way in reverse."""
    program = breadth_first((0, 1, 0, 1), 2, 2)
    assert texts(program.line(1)) == ["1F0", "1F1", "3F0", "3F1", "3B1", "3B0", "1B1", "1B0"]
    assert texts(breadth_first((0, 1, 0, 1), 2, 2, train=False).line(1)) == ["1F0", "1F1", "3F0", "3F1"]
