"""Simulations' figures; tests/schedules/test_figures.py has whole schedules'."""

from itertools import pairwise

import attrs
import numpy as np
import pytest

from drawloom.components.pipeline.program.builders import build_forward_only_program
from drawloom.components.pipeline.program.lowering import Sharding
from drawloom.components.pipeline.program.timing import Costs, DeadlockError
from drawloom.components.pipeline.simulation.simulator import Simulation, simulate
from drawloom.components.ports.program import BACKWARD, BACKWARD_WEIGHT
from support.schedules import parse_program, schedule

PROGRAM = parse_program("0: 0F0 0F1 0F2 0I0 0W0 0B1 0B2\n1: 1F0 1I0 1F1 1I1 1W0 1F2 1W1 1B2\n")


def test_makespan_and_span_differ() -> None:
    """The makespan is over all ranks, the span is the longest of a single rank."""
    run = simulate(PROGRAM, Costs())
    assert (run.makespan, run.longest_rank_span, run.busiest_rank_compute_time) == (12, 12, 9)
    late = simulate(parse_program("0: 0F0\n1: 1F0\n"), Costs())
    assert (late.makespan, late.longest_rank_span, late.busiest_rank_compute_time) == (2, 1, 1)
    assert (late.bubble_fraction, late.longest_span_bubble_fraction) == (0.5, 0)


def test_peaks_are_counted_in_order() -> None:
    """Peaks count from forwards to input gradients, to weight gradients, and pending weight gradients."""
    run = simulate(PROGRAM, Costs())
    assert run.peak_activations == [3, 1]
    assert run.peak_microbatches_in_flight == [3, 2]
    assert run.peak_pending_weight_grads == [1, 2]
    assert run.action_counts == {"F": 6, "B": 3, "I": 3, "W": 3}


def test_bubbles_are_never_negative() -> None:
    """Sums rounded in another order make no bubble on a rank that never waits."""
    forwards = build_forward_only_program((0, 1), 7)
    bubbles = [simulate(forwards, Costs(number / 97, comm=0.1)).longest_span_bubble_fraction for number in range(1, 97)]
    assert all(0 <= bubble < 1e-9 for bubble in bubbles)


def test_bars_are_in_order() -> None:
    """The bars of a rank don't overlap."""
    bars = list(simulate(PROGRAM, Costs(comm=0.3)).iterate_bars(1))
    assert " ".join(str(bar.action) for bar in bars) == "1F0 1I0 1F1 1I1 1W0 1F2 1W1 1B2"
    assert all(one.end <= other.start for one, other in pairwise(bars))
    assert bars[0].start == pytest.approx(1.3)


def test_contention_never_shortens_the_makespan() -> None:
    """With messages on shared channels, the makespan is not shorter."""
    free = simulate(PROGRAM, Costs(comm=0.4))
    for channels in ("direction", "pair", "rank", "blocking"):
        assert simulate(PROGRAM, Costs(comm=0.4), channels).makespan >= free.makespan


def test_peak_boundary_counts_p2p_buffers() -> None:
    """Tensors being sent, being received, or not consumed yet are counted."""
    program = parse_program("0: 0F0 0F1 0F2 0B0 0B1 0B2\n1: 1F0 1B0 1F1 1B1 1F2 1B2\n")
    assert simulate(program, Costs(comm=0.25)).peak_p2p_tensors == [2, 3]
    assert simulate(parse_program("0: 0F0 1F0 1B0 0B0\n"), Costs()).peak_p2p_tensors == [0]


def test_a_deadlock_has_no_simulation() -> None:
    """Simulating a program that cannot finish raises DeadlockError."""
    with pytest.raises(DeadlockError):
        simulate(parse_program("0: 0B0 0F0\n"), Costs())


@pytest.mark.parametrize("sharding", [Sharding(), Sharding(gathered=True), Sharding(True, reduces_per_microbatch=True)])
@pytest.mark.parametrize("name", ["one_f_one_b", "zero_bubble_v", "dual_pipe_v"])
def test_actions_on_shards_that_cost_nothing_change_no_time(name: str, sharding: Sharding) -> None:
    """Start and end of compute actions are unchanged by shards, and the shard actions exist."""
    program, costs = schedule(name).program(4, 12), Costs(1, 1.5, 0.5, comm=0.25)
    plain, run = simulate(program, costs), simulate(program, costs, sharding=sharding)
    assert np.allclose(run.start, plain.start) and np.allclose(run.end, plain.end)
    assert run.makespan == pytest.approx(plain.makespan) and run.longest_rank_span == pytest.approx(
        plain.longest_rank_span
    )
    ops = [bar.action.op for bars in run.shard_bars for bar in bars]
    assert ops.count("REDUCE_GRAD") == program.stages and ops.count("UNSHARD") == program.stages * sharding.gathered
    whole = int(np.isin(program.op, (BACKWARD, BACKWARD_WEIGHT)).sum())
    assert ops.count("REDUCE_SCATTER") >= (whole - program.stages) * sharding.reduces_per_microbatch
    assert not plain.shard_bars


def test_a_stage_is_gathered_before_its_first_forward_and_reduced_with_its_backward() -> None:
    """F waits for the gather; the reduction overlaps with B, begins behind W, and can end the step."""
    sharding, costs = Sharding(gathered=True), Costs(1, 2, 2, unshard=3, reduce=1)
    whole = simulate(parse_program("0: 0F0 0B0"), costs, sharding=sharding)
    assert times_of_rank(whole) == {"0UNSHARD0": (0, 3), "0F0": (3, 4), "0B0": (4, 8), "0REDUCE_GRAD0": (4, 8)}
    slow = simulate(parse_program("0: 0F0 0B0"), attrs.evolve(costs, reduce=7), sharding=sharding)
    assert (
        times_of_rank(slow)["0REDUCE_GRAD0"] == (4, 11)
        and slow.makespan == slow.longest_rank_span == 11
        and slow.busiest_rank_compute_time == 5
    )
    split = simulate(
        parse_program("0: 0F0 0F1 0I0 0I1 0W0 0W1"), costs, sharding=Sharding(True, reduces_per_microbatch=True)
    )
    assert times_of_rank(split)["0W0"] == (9, 11) and times_of_rank(split)["0REDUCE_SCATTER0"] == (11, 12)
    assert (
        times_of_rank(split)["0W1"] == (11, 13)
        and times_of_rank(split)["0REDUCE_GRAD1"] == (13, 14)
        and split.makespan == 14
    )


def test_a_later_stage_is_gathered_while_an_earlier_one_computes() -> None:
    """Gathers of a rank follow one another, and only the first one delays its work."""
    run = simulate(parse_program("0: 0F0 1F0 1B0 0B0"), Costs(2, unshard=1.5), sharding=Sharding(gathered=True))
    times = times_of_rank(run)
    assert (times["0UNSHARD0"], times["1UNSHARD0"]) == ((0, 1.5), (1.5, 3))
    assert (times["0F0"], times["1F0"]) == ((1.5, 3.5), (3.5, 5.5))


def times_of_rank(run: Simulation) -> dict[str, tuple[float, float]]:
    """Start and end of all actions of rank 0, by their text."""
    return {str(bar.action): (bar.start, bar.end) for bar in (*run.iterate_bars(0), *run.shard_bars[0])}
