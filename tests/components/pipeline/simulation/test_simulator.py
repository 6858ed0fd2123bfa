"""The figures of simulations; those of whole schedules are in tests/schedules/test_figures.py."""

from itertools import pairwise

import pytest

from drawloom.components.pipeline.program.notation import read_program
from drawloom.components.pipeline.program.timing import Costs, Deadlock
from drawloom.components.pipeline.simulation.simulator import simulate

PROGRAM = read_program("0: 0F0 0F1 0F2 0I0 0W0 0B1 0B2\n1: 1F0 1I0 1F1 1I1 1W0 1F2 1W1 1B2\n")


def test_makespan_and_span_differ() -> None:
    """The makespan is over all ranks, the span is the longest of a single rank."""
    run = simulate(PROGRAM, Costs())
    assert (run.makespan, run.span, run.ideal) == (12, 12, 9)
    late = simulate(read_program("0: 0F0\n1: 1F0\n"), Costs())
    assert (late.makespan, late.span, late.ideal) == (2, 1, 1)
    assert (late.bubble, late.span_bubble) == (0.5, 0)


def test_peaks_are_counted_in_order() -> None:
    """Peaks count from forwards to input gradients, to weight gradients, and pending weight gradients."""
    run = simulate(PROGRAM, Costs())
    assert run.peak_activations == [3, 1]
    assert run.peak_live_weights == [3, 2]
    assert run.peak_pending_weight_grads == [1, 2]
    assert run.actions == {"F": 6, "B": 3, "I": 3, "W": 3}


def test_bars_are_in_order() -> None:
    """The bars of a rank don't overlap."""
    bars = list(simulate(PROGRAM, Costs(comm=0.3)).bars(1))
    assert " ".join(str(bar.action) for bar in bars) == "1F0 1I0 1F1 1I1 1W0 1F2 1W1 1B2"
    assert all(one.end <= other.start for one, other in pairwise(bars))
    assert bars[0].start == pytest.approx(1.3)


def test_contention_never_makes_it_shorter() -> None:
    """With messages that share channels, the makespan is not shorter."""
    free = simulate(PROGRAM, Costs(comm=0.4))
    for channels in ("direction", "pair", "rank", "blocking"):
        assert simulate(PROGRAM, Costs(comm=0.4), channels).makespan >= free.makespan


def test_peak_boundary_counts_p2p_buffers() -> None:
    """Tensors that are being sent, being received, or not consumed yet are counted."""
    program = read_program("0: 0F0 0F1 0F2 0B0 0B1 0B2\n1: 1F0 1B0 1F1 1B1 1F2 1B2\n")
    assert simulate(program, Costs(comm=0.25)).peak_boundary == [2, 3]
    assert simulate(read_program("0: 0F0 1F0 1B0 0B0\n"), Costs()).peak_boundary == [0]


def test_a_deadlock_has_no_simulation() -> None:
    """Simulating a program that can't finish raises Deadlock."""
    with pytest.raises(Deadlock):
        simulate(read_program("0: 0B0 0F0\n"), Costs())
