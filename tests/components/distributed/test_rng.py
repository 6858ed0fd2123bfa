"""Seeds and generators by purpose."""

import hypothesis
import torch
from hypothesis import strategies as st

from drawloom.components.distributed.rng import create_generator, derive_seed

PURPOSES = st.lists(st.integers(0, 10**6) | st.text(max_size=5), max_size=4)


def test_derived_seeds_never_change() -> None:
    """A changed value would change every resumed run. The values were computed with sha256sum."""
    assert derive_seed(0) == 0xD0BCA111F8628137 >> 1  # of [0]
    assert derive_seed(7, "dropout", 3) == 0xD4947D8F12684449 >> 1  # of [7, "dropout", 3]


@hypothesis.given(st.integers(0, 100), PURPOSES, st.integers(0, 100), PURPOSES)
def test_different_purposes_give_different_seeds(
    seed: int, purpose: list[str | int], other_seed: int, other: list[str | int]
) -> None:
    """Neither joined words nor a number written as text collide with another purpose."""
    same = (seed, purpose) == (other_seed, other)
    assert (derive_seed(seed, *purpose) == derive_seed(other_seed, *other)) == same
    assert 0 <= derive_seed(seed, *purpose) < 2**63


def test_a_generator_is_reproducible_and_separate() -> None:
    """Two generators of one purpose are equal, and drawing from them leaves torch's default generator unchanged."""
    before = torch.get_rng_state()
    first, second = (torch.rand(5, generator=create_generator(1, "noise", 2)) for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first, torch.rand(5, generator=create_generator(1, "noise", 3)))
    assert torch.equal(before, torch.get_rng_state())
