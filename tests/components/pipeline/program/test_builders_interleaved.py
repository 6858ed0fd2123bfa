"""Rounds of microbatches."""

from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.pipeline.program.builders import (
    backward,
    backward_input,
    backward_weight,
    forward,
    interleaved,
    rounds,
)


@given(ranks=st.integers(1, 9), microbatches=st.integers(1, 60))
def test_rounds_are_as_even_as_can_be(ranks: int, microbatches: int) -> None:
    """Together they are all microbatches, each has as many as ranks at least if there are, the first ones the most."""
    sizes = rounds(ranks, microbatches)
    assert sum(sizes) == microbatches
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(ranks, microbatches) and len(sizes) == max(1, microbatches // ranks)


def test_a_row_warms_up_then_alternates() -> None:
    """Forwards ahead, then one forward and one backward, then the backwards left over; a round a stage at a time."""
    f0, f1, b0, b1 = forward(0), forward(1), backward(0), backward(1)
    assert interleaved(1, 2, 2, 4, backward, lead=2) == [f0, f0, f1, b1, f1, b1, f0, b0, f0, b0, f1, b1, f1, b1, b0, b0]


def test_weights_are_paid_once_enough_are_owed() -> None:
    """With a lag of one, a weight gradient follows each backward but the first, and one is left for the end."""
    row = interleaved(1, 2, 1, 3, backward_input, lead=1, lag=1)
    f, i, w = forward(0), backward_input(0), backward_weight(-1)
    assert row == [f, i, f, i, w, f, i, w, w]
