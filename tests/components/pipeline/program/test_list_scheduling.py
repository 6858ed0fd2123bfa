"""Lines filled greedily."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.pipeline.program.costs import Costs
from drawloom.components.pipeline.program.list_scheduling import fill_bubbles, list_schedule
from drawloom.components.pipeline.program.notation import read_program
from drawloom.components.pipeline.program.validity import faults
from drawloom.components.pipeline.simulation.simulator import simulate
from support.schedules import schedule, texts

COSTS = st.builds(Costs, *[st.floats(0.2, 2.0)] * 3, comm=st.floats(0, 1.0))


@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 14), limit=st.integers(2, 16), costs=COSTS)
def test_any_memory_will_do(ranks: int, microbatches: int, limit: int, costs: Costs) -> None:
    """However little memory there is and whatever work costs, all of it is done, and no rank holds more."""
    program = list_schedule(ranks, microbatches, limit, costs)
    assert faults(program) == []
    assert max(simulate(program, costs).peak_live_weights) <= limit


@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 14), costs=COSTS)
def test_filling_gaps_keeps_the_order(ranks: int, microbatches: int, costs: Costs) -> None:
    """Forwards and backwards towards inputs stay as they were; weight gradients come as they were owed."""
    before = schedule("dual_pipe_v").program(ranks, microbatches)
    after = fill_bubbles(before, 2 * ranks + 1, costs)
    assert faults(after) == []
    for rank in range(ranks):
        plain = [label.replace("B", "I") for text in texts(before.line(rank)) for label in text.split("|")]
        filled = texts(after.line(rank))
        assert [label for label in filled if "W" not in label] == [label for label in plain if "W" not in label]
        inputs = [label.replace("I", "W") for label in filled if "I" in label]
        assert [label for label in filled if "W" in label] == inputs


def test_weights_wait_for_what_comes_soon() -> None:
    """A rank that could do weights waits instead, if what it waits for comes within half the time."""
    program = read_program("0: 0F0 0F1 0B0 0B1\n1: 1F0 1B0 1F1 1B1\n")
    short = texts(fill_bubbles(program, 4, Costs(1, 1, 1.0, comm=0.3)).line(0))
    long = texts(fill_bubbles(program, 4, Costs(1, 1, 2.5, comm=0.3)).line(0))
    assert short == ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"]
    assert long == ["0F0", "0F1", "0I0", "0I1", "0W0", "0W1"]


def test_no_rank_sits_idle_while_it_has_something_to_do() -> None:
    """Carried out as it was filled, a rank only waits while it owes nothing, or for less than half a piece of work."""
    run = simulate(list_schedule(4, 12, 8, Costs()), Costs())
    for rank in range(4):
        bars = list(run.line(rank))
        for number, (one, other) in enumerate(pairwise(bars), 1):
            works = "".join(bar.action.op for bar in bars[:number])
            assert other.start == one.end or works.count("I") == works.count("W")
