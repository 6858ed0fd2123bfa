"""What simulations say; figures of whole schedules are in tests/schedules/test_figures.py."""

from itertools import pairwise

import pytest

from drawloom.components.pipeline.program.costs import Costs
from drawloom.components.pipeline.program.notation import read_program
from drawloom.components.pipeline.program.timing import Deadlock
from drawloom.components.pipeline.simulation.simulator import simulate

PROGRAM = read_program("0: 0F0 0F1 0F2 0I0 0W0 0B1 0B2\n1: 1F0 1I0 1F1 1I1 1W0 1F2 1W1 1B2\n")


def test_makespan_and_span_are_two() -> None:
    """The makespan is from first start to last end of all, the span the longest of a rank's own."""
    run = simulate(PROGRAM, Costs())
    assert (run.makespan, run.span, run.ideal) == (12, 12, 9)
    late = simulate(read_program("0: 0F0\n1: 1F0\n"), Costs())
    assert (late.makespan, late.span, late.ideal) == (2, 1, 1)
    assert (late.bubble, late.span_bubble) == (0.5, 0)


def test_what_is_held_is_counted_in_order() -> None:
    """From forwards to input gradients, to weight gradients, and weight gradients that are owed."""
    run = simulate(PROGRAM, Costs())
    assert run.peak_activations == [3, 1]
    assert run.peak_live_weights == [3, 2]
    assert run.peak_pending_weight_grads == [1, 2]
    assert run.actions == {"F": 6, "B": 3, "I": 3, "W": 3}


def test_bars_are_in_order() -> None:
    """A rank's bars follow one another without running into each other."""
    bars = list(simulate(PROGRAM, Costs(comm=0.3)).line(1))
    assert " ".join(str(bar.action) for bar in bars) == "1F0 1I0 1F1 1I1 1W0 1F2 1W1 1B2"
    assert all(one.end <= other.start for one, other in pairwise(bars))
    assert bars[0].start == pytest.approx(1.3)


def test_channels_only_make_it_longer() -> None:
    """With messages that hinder one another nothing ends earlier."""
    free = simulate(PROGRAM, Costs(comm=0.4))
    for channels in ("direction", "pair", "rank", "blocking"):
        assert simulate(PROGRAM, Costs(comm=0.4), channels).makespan >= free.makespan


def test_tensors_between_stages_are_counted() -> None:
    """One that is waited for, one that is being sent: as many as lie about at once on a rank."""
    program = read_program("0: 0F0 0F1 0F2 0B0 0B1 0B2\n1: 1F0 1B0 1F1 1B1 1F2 1B2\n")
    assert simulate(program, Costs(comm=0.25)).peak_boundary == [2, 3]
    assert simulate(read_program("0: 0F0 1F0 1B0 0B0\n"), Costs()).peak_boundary == [0]


def test_a_program_that_never_ends_is_stuck() -> None:
    """There is no simulation of a deadlock."""
    with pytest.raises(Deadlock):
        simulate(read_program("0: 0B0 0F0\n"), Costs())
