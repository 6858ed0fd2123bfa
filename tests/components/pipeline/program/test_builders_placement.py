"""Stages' ranks."""

from drawloom.components.pipeline.program.builders import (
    assign_stages_in_loop,
    assign_stages_in_vee,
    list_stages_of_rank,
)


def test_a_loop_assigns_stages_round_robin() -> None:
    """Stage s belongs to rank s mod p."""
    assert assign_stages_in_loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert list_stages_of_rank(1, assign_stages_in_loop(3, 2)) == [1, 4]


def test_a_v_assigns_first_and_last_stage_to_one_rank() -> None:
    """The last rank holds two consecutive stages, the first rank the first and the last stage."""
    assert assign_stages_in_vee(3) == (0, 1, 2, 2, 1, 0)
    assert [list_stages_of_rank(rank, assign_stages_in_vee(3)) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
