"""Pairs of queries and keys, and the operations of training."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.components.ports.data import count_visible_keys
from drawloom.components.ports.model import ForwardFlops

LENGTHS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), max_size=3)


@given(LENGTHS, st.none() | st.integers(1, 5))
def test_pairs_equal_those_of_the_mask(lengths: list[list[int]], window: int | None) -> None:
    """Pairs counted one by one: a token and earlier tokens in the same document and window."""
    length = max((sum(row) for row in lengths), default=0)
    rows = [[n for n, size in enumerate(row) for _ in range(size)] for row in lengths]
    padded = [row + [99] * (length - len(row)) for row in rows]
    expected = sum(
        row[query] == row[key] and (window is None or query - key < window)
        for row in padded
        for query in range(length)
        for key in range(query + 1)
    )
    documents = torch.tensor(padded, dtype=torch.int64).view(len(padded), length)
    assert int(count_visible_keys(documents).clamp(max=window or length).sum()) == expected


def test_frozen_weights_have_no_gradients() -> None:
    """Forward, the gradient of the input, and of the weight if it is trained; attention three times in all."""
    flops = ForwardFlops({"a": 2.0, "b": 10.0}, {None: 4.0, 8: 100.0})
    pairs = {None: 7.0, 8: 3.0}
    assert flops.count_training_flops(5, pairs) == 5 * 3 * 12 + 3 * (28 + 300)
    assert flops.count_training_flops(5, pairs, frozen={"b", "other"}) == 5 * (3 * 2 + 2 * 10) + 3 * (28 + 300)
