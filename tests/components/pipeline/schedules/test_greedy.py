"""The greedy schedule."""

import pytest

from drawloom.components.pipeline.program.costs import Costs
from drawloom.components.pipeline.schedules.greedy import Greedy
from drawloom.components.pipeline.simulation.simulator import simulate


def test_it_is_made_for_the_costs_that_it_is_given() -> None:
    """Told that messages take long, it is quicker when they do than if it had not been told."""
    late = Costs(comm=1.0)
    told = simulate(Greedy(comm=1.0).program(4, 16), late).makespan
    assert told < simulate(Greedy().program(4, 16), late).makespan


def test_more_memory_makes_it_quicker() -> None:
    """The bubble falls as memory grows, from the least there can be to that of ZBV."""
    bubbles = [simulate(Greedy(memory=memory).program(4, 16), Costs()).bubble for memory in (1, 2, 3, 5)]
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[-1] == pytest.approx(3 / 99)


def test_work_that_costs_nothing_is_refused() -> None:
    """Costs of work are above zero, memory is one microbatch at least."""
    with pytest.raises(ValueError, match="forward: 0 is not above 0"):
        Greedy(forward=0)
    with pytest.raises(ValueError, match="memory: 0 is less than 1"):
        Greedy(memory=0)
