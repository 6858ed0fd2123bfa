"""Random streams by purpose."""

import hypothesis
import torch
from hypothesis import strategies as st

from drawloom.components.distributed.rng import derive_seed, generator

PURPOSES = st.lists(st.integers(0, 10**6) | st.text(max_size=5), max_size=4)


def test_derived_numbers_never_change() -> None:
    """These numbers are for ever: a resumed run draws what it would have drawn. Worked out with sha256sum."""
    assert derive_seed(0) == 0xD0BCA111F8628137 >> 1  # of [0]
    assert derive_seed(7, "dropout", 3) == 0xD4947D8F12684449 >> 1  # of [7, "dropout", 3]


@hypothesis.given(st.integers(0, 100), PURPOSES, st.integers(0, 100), PURPOSES)
def test_only_equal_purposes_give_equal_numbers(
    seed: int, purpose: list[str | int], other_seed: int, other: list[str | int]
) -> None:
    """Neither joining words nor writing a number as text makes two purposes one."""
    same = (seed, purpose) == (other_seed, other)
    assert (derive_seed(seed, *purpose) == derive_seed(other_seed, *other)) == same
    assert 0 <= derive_seed(seed, *purpose) < 2**63


def test_a_stream_repeats_itself_and_leaves_the_rest_alone() -> None:
    """Two streams of one purpose are equal, and drawing from them does not touch torch's own generator."""
    before = torch.get_rng_state()
    first, second = (torch.rand(5, generator=generator(1, "noise", 2)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.rand(5, generator=generator(1, "noise", 3)))
    assert torch.equal(before, torch.get_rng_state())
