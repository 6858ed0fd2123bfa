"""The cost of building programs."""

import cProfile

import pytest

from drawloom.components.pipeline.program.lowering import lower_to_rank_program
from drawloom.components.ports.program import iterate_actions
from support.schedules import schedule


def _count_calls_and_actions(name: str, microbatches: int) -> tuple[int, int]:
    """Return the function calls that build the program of one rank of 256, and its action count.

    Calls are counted instead of seconds, which depend on other processes.
    """
    profile = cProfile.Profile()
    line = profile.runcall(lambda: lower_to_rank_program(schedule(name).program(256, microbatches), 100))
    return sum(entry.callcount for entry in profile.getstats()), len([*iterate_actions(line)])


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zero_bubble_v", "dual_pipe_v"])
def test_building_the_program_of_a_rank_of_256_grows_linearly(name: str) -> None:
    """Twice the microbatches take at most 2.1 times the calls, and 512 take fewer than 200 calls per action."""
    half, _ = _count_calls_and_actions(name, 256)
    whole, actions = _count_calls_and_actions(name, 512)
    assert actions >= 6000
    assert whole < 2.1 * half
    assert whole < 200 * actions
