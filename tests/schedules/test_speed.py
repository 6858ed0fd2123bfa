"""The cost of building programs."""

import cProfile

import pytest

from drawloom.components.pipeline.program.lowering import lower
from drawloom.components.ports.program import flat
from support.schedules import schedule


def _calls_and_actions(name: str, microbatches: int) -> tuple[int, int]:
    """The number of function calls to build the program of a rank of 256, and its number of actions.

    Calls are counted, not seconds: a count is the same on a busy machine.
    """
    profile = cProfile.Profile()
    line = profile.runcall(lambda: lower(schedule(name).program(256, microbatches), 100))
    return sum(entry.callcount for entry in profile.getstats()), len([*flat(line)])


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zero_bubble_v", "dual_pipe_v"])
def test_building_the_program_of_a_rank_of_256_grows_linearly(name: str) -> None:
    """Twice the microbatches take at most 2.1 times the calls, and 512 microbatches fewer than 200 calls an action."""
    half, _ = _calls_and_actions(name, 256)
    whole, actions = _calls_and_actions(name, 512)
    assert actions >= 6000
    assert whole < 2.1 * half
    assert whole < 200 * actions
