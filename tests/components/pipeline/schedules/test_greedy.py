"""The greedy schedule."""

import pytest

from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.schedules.greedy import Greedy
from drawloom.components.pipeline.simulation.simulator import simulate


def test_the_schedule_depends_on_its_costs() -> None:
    """With the true cost of messages it is faster than with messages of cost 0."""
    late = Costs(comm=1.0)
    informed = simulate(Greedy(comm=1.0).program(4, 16), late).makespan
    assert informed < simulate(Greedy().program(4, 16), late).makespan


def test_more_memory_makes_it_faster() -> None:
    """The bubble falls with growing memory, down to that of ZBV."""
    bubbles = [simulate(Greedy(memory=memory).program(4, 16), Costs()).bubble for memory in (1, 2, 3, 5)]
    assert bubbles == sorted(bubbles, reverse=True)
    assert bubbles[-1] == pytest.approx(3 / 99)


def test_costs_of_zero_are_refused() -> None:
    """Costs of ops are above zero, memory is at least one microbatch."""
    with pytest.raises(ValueError, match="forward: 0 is not above 0"):
        Greedy(forward=0)
    with pytest.raises(ValueError, match="memory: 0 is less than 1"):
        Greedy(memory=0)
