"""Programs as columns, and as lists of actions by rank."""

from typing import Any

import numpy as np
import pytest

from drawloom.components.ports.program import Action, Overlap, Program, RankProgram, iterate_actions

RANK_PROGRAMS: list[RankProgram] = [
    [Action(0, "F", 0), Overlap((Action(0, "F", 1), Action(3, "B", 0))), Action(3, "I", 1), Action(3, "W", 1)],
    [Action(1, "F", 0), Action(2, "F", 0)],
]


@pytest.mark.parametrize("policies", [("blocks",), ("none", "all"), ("none", 0)])
def test_every_stage_needs_a_known_policy(policies: tuple[Any, ...]) -> None:
    """A program has a recomputation policy for all its stages, or for none."""
    lines = [[Action(stage, op, 0) for op in "FB"] for stage in range(2)]  # type: ignore[arg-type]
    assert Program.from_rank_programs(lines, recompute=("blocks", 2)).recompute == ("blocks", 2)
    with pytest.raises(ValueError, match="recompute = "):
        Program.from_rank_programs(lines, recompute=policies)


def test_rank_programs_round_trip() -> None:
    """A program made from rank programs returns them, and has their ranks, stages and microbatches."""
    program = Program.from_rank_programs(RANK_PROGRAMS)
    assert [program.rank_program(rank) for rank in range(2)] == RANK_PROGRAMS
    assert (program.ranks, program.stages, program.microbatches) == (2, 4, 2)
    assert program.stage_to_rank == (0, 1, 1, 0)
    assert program.rank_by_action.tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_labels_equal_those_of_torch() -> None:
    """Actions are written stage, op, microbatch; parts of an overlap are separated by a bar."""
    assert [str(item) for item in RANK_PROGRAMS[0]] == ["0F0", "0F1|3B0", "3I1", "3W1"]
    assert str(Action(3, "SEND_F", 7, peer=1)) == "3SEND_F7"


def test_part_of_an_overlap_can_be_dropped() -> None:
    """The remaining part of an overlap is an action by itself."""
    program = Program.from_rank_programs(RANK_PROGRAMS)
    without_forward = program.select_actions(~((program.op == 0) & (program.microbatch == 1)))
    assert [str(item) for item in without_forward.rank_program(0)] == ["0F0", "3B0", "3I1", "3W1"]
    without_backward = program.select_actions(program.op != 1)
    assert [str(item) for item in without_backward.rank_program(0)] == ["0F0", "0F1", "3I1", "3W1"]
    assert without_backward.rank_program(1) == RANK_PROGRAMS[1]


def test_flat_takes_overlaps_apart() -> None:
    """flat gives the parts of overlaps one by one, in order."""
    assert [str(action) for action in iterate_actions(RANK_PROGRAMS[0])] == ["0F0", "0F1", "3B0", "3I1", "3W1"]


def test_a_program_holds_no_messages() -> None:
    """A program with a send is refused."""
    with pytest.raises(ValueError, match="0SEND_F0 sends or receives a message"):
        Program.from_rank_programs([[Action(0, "SEND_F", 0, peer=1)]])


def test_a_stage_belongs_to_one_rank() -> None:
    """It is an error if two ranks work on a stage, or none does."""
    with pytest.raises(ValueError, match="ranks 0 and 1 both work on stage 0"):
        Program.from_rank_programs([[Action(0, "F", 0)], [Action(0, "B", 0)]])
    with pytest.raises(ValueError, match="no rank works on stage 1"):
        Program.from_rank_programs([[Action(0, "F", 0)], [Action(2, "F", 0)]])


def test_a_rank_program_may_be_empty() -> None:
    """A rank without actions has an empty program."""
    program = Program.from_rank_programs([[], [Action(0, "F", 0)]], stage_to_rank=[1])
    assert (program.rank_program(0), program.rows(1)) == ([], slice(0, 1))
    assert program.select_actions(np.array([False])).rank_program(1) == []


def test_parts_of_a_program_keep_its_recomputation() -> None:
    """It is listed by stage; without it, the stages' own policy applies."""
    program = Program.from_rank_programs(RANK_PROGRAMS, recompute=("none", 2, "blocks", "selective"))
    assert program.select_actions(program.op == 0).recompute == ("none", 2, "blocks", "selective")
    assert Program.from_rank_programs(RANK_PROGRAMS).recompute == ()
