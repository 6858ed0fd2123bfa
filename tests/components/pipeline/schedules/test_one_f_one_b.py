"""1F1B."""

from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.pipeline.program.timing import Costs
from drawloom.components.pipeline.schedules.one_f_one_b import OneFOneB
from drawloom.components.pipeline.simulation.simulator import simulate
from support.schedules import texts


def test_one_rank_is_the_plain_training_loop() -> None:
    """On one rank, every microbatch's backward follows its forward."""
    assert texts(OneFOneB().program(1, 2).rank_program(0)) == ["0F0", "0B0", "0F1", "0B1"]


@given(ranks=st.integers(1, 8), microbatches=st.integers(1, 32))
def test_rank_r_holds_at_most_p_minus_r_microbatches(ranks: int, microbatches: int) -> None:
    """The peak of activations is p - r microbatches, or all of them if they are fewer."""
    run = simulate(OneFOneB().program(ranks, microbatches), Costs())
    assert run.peak_activations == [min(ranks - rank, microbatches) for rank in range(ranks)]


@given(ranks=st.integers(1, 8), message=st.floats(0, 1))
def test_a_doubled_warm_up_hides_messages(ranks: int, message: float) -> None:
    """With twice the warm-up, messages no longer than a forward cost one hop each way, as in GPipe."""
    run = simulate(OneFOneB(hide_latency=True).program(ranks, 4 * ranks), Costs(comm=message))
    assert abs(run.makespan - 3 * (5 * ranks - 1) - 2 * message * (ranks - 1)) < 1e-9
    assert run.peak_activations == [2 * (ranks - rank) - 1 for rank in range(ranks)]
