"""Rows of op codes."""

from drawloom.components.pipeline.program.builders import (
    B0,
    B1,
    F0,
    F1,
    I0,
    I1,
    W0,
    W1,
    OpCodes,
    W,
    assign_stages_in_loop,
    assign_stages_in_vee,
    build_program,
    encode_op,
    overlap_op_codes,
)
from drawloom.components.ports.program import FORWARD


def woven(row: OpCodes, microbatches: int = 9, *, backward_newest_first: bool = False) -> str:
    """Return the program of a single rank with two stages, as text."""
    program = build_program([row], assign_stages_in_vee(1), microbatches, backward_newest_first=backward_newest_first)
    return " ".join(map(str, program.rank_program(0)))


def test_microbatches_are_counted() -> None:
    """The n-th forward of a stage is microbatch n; whole and split backwards are numbered together."""
    assert woven([F0, F0, F1, B1, F1, I1, B0, I0]) == "0F0 0F1 1F0 1B0 1F1 1I1 0B0 0I1"


def test_weight_gradients_are_a_queue() -> None:
    """W is the oldest pending weight gradient of any stage, W0 and W1 the oldest of their stage."""
    assert woven([I1, I0, I1, W, W, W]) == "1I0 0I0 1I1 1W0 0W0 1W1"
    assert woven([I1, I0, I1, W0, W1, W1]) == "1I0 0I0 1I1 0W0 1W0 1W1"


def test_whole_backwards_leave_no_weight_gradient() -> None:
    """B leaves no pending weight gradient, so W belongs to a later I."""
    assert woven([B1, I1, B0, I0, W, W]) == "1B0 1I1 0B0 0I1 1W1 0W1"


def test_overlaps_are_numbered_as_their_parts() -> None:
    """The parts of an overlap are numbered like other ops."""
    assert woven([F0, *overlap_op_codes(F0, B1), *overlap_op_codes(F1, B0)]) == "0F0 0F1|1B0 1F0|0B0"


def test_backwards_can_start_from_the_newest() -> None:
    """Backwards then take microbatches from the last to the first."""
    assert woven([F0, F0, B0, B0], 2, backward_newest_first=True) == "0F0 0F1 0B1 0B0"


def test_surplus_microbatches_are_left_out() -> None:
    """Actions of microbatches beyond the number asked for are dropped, and the other half of an overlap stays."""
    assert woven([F0, F0, *overlap_op_codes(F0, B0), *overlap_op_codes(F0, B0), B0], 2) == "0F0 0F1 0B0 0B1"
    assert woven([F0, *overlap_op_codes(F0, B0), F0, B0], 2) == "0F0 0F1|0B0 0B1"


def test_stages_follow_from_the_placement() -> None:
    """Local stages are counted from a rank's first stage."""
    row = [F0, F1]
    around = build_program([row] * 3, assign_stages_in_loop(3, 2), 1)
    down_and_up = build_program([row] * 3, assign_stages_in_vee(3), 1)
    assert [str(around.rank_program(rank)[1]) for rank in range(3)] == ["3F0", "4F0", "5F0"]
    assert [str(down_and_up.rank_program(rank)[1]) for rank in range(3)] == ["5F0", "4F0", "3F0"]
    assert str(build_program([[encode_op(FORWARD, 4)]], assign_stages_in_loop(1, 5), 1).rank_program(0)[0]) == "4F0"
