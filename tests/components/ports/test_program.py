"""Programs as columns, and as lines."""

import numpy as np
import pytest

from drawloom.components.ports.program import Action, Overlap, Program, RankProgram, flat

LINES: list[RankProgram] = [
    [Action(0, "F", 0), Overlap((Action(0, "F", 1), Action(3, "B", 0))), Action(3, "I", 1), Action(3, "W", 1)],
    [Action(1, "F", 0), Action(2, "F", 0)],
]


def test_lines_come_back_from_columns() -> None:
    """A program made from lines gives these lines, and knows its ranks, stages and microbatches."""
    program = Program.of(LINES)
    assert [program.line(rank) for rank in range(2)] == LINES
    assert (program.ranks, program.stages, program.microbatches) == (2, 4, 2)
    assert program.stage_to_rank == (0, 1, 1, 0)
    assert program.rank.tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_labels_are_those_of_the_field() -> None:
    """Actions are written stage, work, microbatch; parts of an overlap stand side by side."""
    assert [str(item) for item in LINES[0]] == ["0F0", "0F1|3B0", "3I1", "3W1"]
    assert str(Action(3, "SEND_F", 7, peer=1)) == "3SEND_F7"


def test_part_of_an_overlap_can_be_left_out() -> None:
    """What is left of an overlap is an action by itself."""
    program = Program.of(LINES)
    without_forward = program.select(~((program.op == 0) & (program.microbatch == 1)))
    assert [str(item) for item in without_forward.line(0)] == ["0F0", "3B0", "3I1", "3W1"]
    without_backward = program.select(program.op != 1)
    assert [str(item) for item in without_backward.line(0)] == ["0F0", "0F1", "3I1", "3W1"]
    assert without_backward.line(1) == LINES[1]


def test_flat_lines_hold_the_parts_of_overlaps() -> None:
    """Overlaps are taken apart, in order."""
    assert [str(action) for action in flat(LINES[0])] == ["0F0", "0F1", "3B0", "3I1", "3W1"]


def test_a_program_holds_no_messages() -> None:
    """Sends and receives are no part of a program."""
    with pytest.raises(ValueError, match="0SEND_F0 is a message"):
        Program.of([[Action(0, "SEND_F", 0, peer=1)]])


def test_a_stage_belongs_to_one_rank() -> None:
    """It is an error if two ranks work on a stage, or none does."""
    with pytest.raises(ValueError, match="ranks 0 and 1 both work on stage 0"):
        Program.of([[Action(0, "F", 0)], [Action(0, "B", 0)]])
    with pytest.raises(ValueError, match="no rank works on stage 1"):
        Program.of([[Action(0, "F", 0)], [Action(2, "F", 0)]])


def test_ranks_may_have_nothing_to_do() -> None:
    """An empty line is a line."""
    program = Program.of([[], [Action(0, "F", 0)]], owners=[1])
    assert (program.line(0), program.rows(1)) == ([], slice(0, 1))
    assert program.select(np.array([False])).line(1) == []
