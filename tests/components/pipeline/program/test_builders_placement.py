"""Stages' ranks."""

from drawloom.components.pipeline.program.builders import loop, stages_of, vee


def test_a_loop_assigns_stages_round_robin() -> None:
    """Stage s belongs to rank s mod p."""
    assert loop(3, 2) == (0, 1, 2, 0, 1, 2)
    assert stages_of(1, loop(3, 2)) == [1, 4]


def test_a_v_assigns_first_and_last_stage_to_one_rank() -> None:
    """The last rank holds two consecutive stages, the first rank the first and the last stage."""
    assert vee(3) == (0, 1, 2, 2, 1, 0)
    assert [stages_of(rank, vee(3)) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
