"""The time of a step."""

import pytest

from drawloom.components.planning.recorder import Part
from drawloom.components.planning.stage_costs import StageCosts
from drawloom.components.planning.step_time import Exchange, StepTime, cost_table, step_time
from drawloom.components.ports.program import Action, Program

PROGRAM = Program.of(
    [
        [Action(0, "F", 0), Action(0, "F", 1), Action(0, "B", 0), Action(0, "B", 1)],
        [Action(1, "F", 0), Action(1, "B", 0), Action(1, "F", 1), Action(1, "B", 1)],
    ]
)
COSTS = {
    0: StageCosts({"F": Part(1.0), "B": Part(2.0, sending=0.5)}, 0),
    1: StageCosts({"F": Part(1.0, host=3.0), "B": Part(4.0)}, 0),
}
NOTHING = Exchange({}, {}, 0.0, 0.0, 0.0)


def test_a_step_takes_the_longest_path_through_both_ranks() -> None:
    """The second rank, whose host is slow, is busy for 14 s; it waits for the first forward and the last backward."""
    found = step_time(PROGRAM, cost_table(COSTS, [NOTHING] * 2, message=0.5), COSTS, [NOTHING] * 2)
    assert (found.compute, found.sending) == (14.0, 0.0)
    assert found.bubble == pytest.approx(1 + 0.5 + 0.5 + 2)


def test_exchanges_are_hidden_by_passes_as_far_as_these_are_longer() -> None:
    """A pass that gathers parameters takes at least as long; sums of gradients run beside the last backward pass."""
    exchanges = [Exchange({0: 1.5}, {}, 0.0, 3.0, 0.25), Exchange({1: 2.5}, {1: 2.0}, 2.0, 3.0, 0.5)]
    found = step_time(PROGRAM, cost_table(COSTS, exchanges, message=0.0), COSTS, exchanges)
    assert found.compute == 2 * 3.0 + 2 * 4.5
    assert (found.gather, found.sync, found.update) == (2.0, 1.0, 0.5)
    assert found.seconds == found.compute + found.bubble + 3.5


def test_the_parts_have_names() -> None:
    """For JSON."""
    assert StepTime(1, 2, 3, 4, 5, 6).as_data()["sync"] == 5
