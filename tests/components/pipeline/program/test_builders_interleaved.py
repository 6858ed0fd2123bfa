"""Rounds of microbatches."""

from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.pipeline.program.builders import build_interleaved_op_codes, encode_op, split_into_rounds
from drawloom.components.ports.program import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD


@given(ranks=st.integers(1, 9), microbatches=st.integers(1, 60))
def test_rounds_are_as_even_as_can_be(ranks: int, microbatches: int) -> None:
    """Rounds sum to all microbatches, have at least as many as ranks if there are, and the larger ones come first."""
    sizes = split_into_rounds(ranks, microbatches)
    assert sum(sizes) == microbatches
    assert sizes == sorted(sizes, reverse=True) and max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(ranks, microbatches) and len(sizes) == max(1, microbatches // ranks)


def test_a_row_warms_up_then_alternates() -> None:
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards."""
    f0, f1, b0, b1 = encode_op(FORWARD, 0), encode_op(FORWARD, 1), encode_op(BACKWARD, 0), encode_op(BACKWARD, 1)
    assert build_interleaved_op_codes(1, 2, 2, 4, BACKWARD, warmup_per_later_rank=2) == [
        f0,
        f0,
        f1,
        b1,
        f1,
        b1,
        f0,
        b0,
        f0,
        b0,
        f1,
        b1,
        f1,
        b1,
        b0,
        b0,
    ]


def test_weight_gradients_follow_after_the_lag() -> None:
    """With a lag of 1, a weight gradient follows every backward except the first, and one is last."""
    row = build_interleaved_op_codes(1, 2, 1, 3, BACKWARD_INPUT, warmup_per_later_rank=1, weight_grad_lag=1)
    f, i, w = encode_op(FORWARD, 0), encode_op(BACKWARD_INPUT, 0), encode_op(BACKWARD_WEIGHT, -1)
    assert row == [f, i, f, i, w, f, i, w, w]
