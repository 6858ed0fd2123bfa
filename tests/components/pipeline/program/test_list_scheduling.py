"""Greedy list scheduling."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.pipeline.program.list_scheduling import fill_bubbles, list_schedule
from drawloom.components.pipeline.program.notation import read_program
from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.program.validity import violations
from drawloom.components.pipeline.simulation.simulator import simulate
from support.schedules import schedule, texts

COSTS = st.builds(Costs, *[st.floats(0.2, 2.0)] * 3, comm=st.floats(0, 1.0))


@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 14), limit=st.integers(2, 16), costs=COSTS)
def test_any_memory_limit_is_kept(ranks: int, microbatches: int, limit: int, costs: Costs) -> None:
    """For any limit and any costs, the program is valid and no rank exceeds the limit."""
    program = list_schedule(ranks, microbatches, limit, costs)
    assert violations(program) == []
    assert max(simulate(program, costs).peak_live_weights) <= limit


@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 14), costs=COSTS)
def test_filling_bubbles_keeps_the_order(ranks: int, microbatches: int, costs: Costs) -> None:
    """Forwards and input gradients keep their order; weight gradients are in the order of their input gradients."""
    before = schedule("dual_pipe_v").program(ranks, microbatches)
    after = fill_bubbles(before, 2 * ranks + 1, costs)
    assert violations(after) == []
    for rank in range(ranks):
        plain = [label.replace("B", "I") for text in texts(before.rank_program(rank)) for label in text.split("|")]
        filled = texts(after.rank_program(rank))
        assert [label for label in filled if "W" not in label] == [label for label in plain if "W" not in label]
        inputs = [label.replace("I", "W") for label in filled if "I" in label]
        assert [label for label in filled if "W" in label] == inputs


def test_a_rank_waits_for_an_action_that_is_ready_soon() -> None:
    """A rank waits instead of running a weight gradient if another action is ready within half of its duration."""
    program = read_program("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n")
    short = texts(fill_bubbles(program, 4, Costs(1, 1, 1.0, comm=0.3)).rank_program(0))
    long = texts(fill_bubbles(program, 4, Costs(1, 1, 2.5, comm=0.3)).rank_program(0))
    assert short == ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]
    assert long == ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]


def test_no_rank_idles_with_pending_weight_gradients() -> None:
    """In the simulation a rank waits only if it has no pending weight gradient."""
    run = simulate(list_schedule(4, 12, 8, Costs()), Costs())
    for rank in range(4):
        bars = list(run.bars(rank))
        for number, (one, other) in enumerate(pairwise(bars), 1):
            works = "".join(bar.action.op for bar in bars[:number])
            assert other.start == one.end or works.count("I") == works.count("W")
