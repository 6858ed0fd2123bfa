"""Stochastic rounding preserves special values and is unbiased."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.stochastic_rounding.eager import philox, round_stochastically, split_into_16bit_halves


def copy(source: Tensor, key: int = 1, counter: int = 0) -> Tensor:
    words = torch.stack(philox(key, torch.arange(-(-len(source) // 8)), counter), 1)
    return round_stochastically(source, split_into_16bit_halves(words)[: len(source)])


def from_bits(*bits: int) -> Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20), st.integers(0, 2**62))
def test_numbers_are_rounded_to_a_neighbour(bits: list[int], key: int) -> None:
    """Any 32 bits are rounded to one of the two nearest bfloat16, with the same sign; NaN stays NaN."""
    source = from_bits(*bits)
    actual = copy(source, key)
    nan = source.isnan()
    assert torch.equal(actual.isnan(), nan)
    below = (source.view(torch.int32) >> 16).to(torch.int16)  # cut off: towards zero
    steps = actual.view(torch.int16) - below
    assert ((steps == 0) | (steps == 1))[~nan].all()
    assert torch.equal(actual.signbit()[~nan], source.signbit()[~nan])


def test_every_nan_stays_nan() -> None:
    """NaN with payloads that would overflow into the sign, or be truncated, stays NaN; infinities keep their signs."""
    source = from_bits(0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF80FFFF, 0x7FC00000, 0x7F80FFFF).repeat(500)
    assert copy(source).isnan().all()
    infinite = torch.tensor([float("inf"), -float("inf")]).repeat(500)
    assert torch.equal(copy(infinite).float(), infinite)


def test_representable_numbers_do_not_change() -> None:
    """No bfloat16 number changes, including subnormals and the largest."""
    bits = torch.arange(65536, dtype=torch.int32) << 16
    source = bits.view(torch.float32)
    numbers = ~source.isnan()
    for counter in range(4):
        assert torch.equal(copy(source, counter=counter).float()[numbers], source[numbers])


def test_numbers_beyond_the_largest_may_become_infinite() -> None:
    """A number between the largest bfloat16 and infinity becomes either, in proportion."""
    largest = torch.finfo(torch.bfloat16).max
    source = from_bits(0x7F7F4000).expand(20_000)  # a quarter of the way
    actual = copy(source).float()
    assert ((actual == largest) | actual.isinf()).all()
    assert actual.isinf().float().mean().item() == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("number", [1.001, -3.14159, 1e-3, 1e-40, -7.3e-39, 6e4])
def test_rounding_is_unbiased(number: float) -> None:
    """Many roundings have the number as mean and the variance of its two neighbours, also for subnormals."""
    count = 200_000
    source = torch.full((count,), number)
    actual = copy(source).double()
    low, high = actual.min(), actual.max()
    exact = source[0].double()
    share = (exact - low) / (high - low)
    variance = share * (1 - share) * (high - low) ** 2
    assert abs(actual.mean() - exact) < 5 * (variance / count).sqrt()
    assert actual.var() == pytest.approx(variance.item(), rel=0.02)


def test_neighbours_are_rounded_independently() -> None:
    """Noise is not correlated between neighbouring elements or between neighbouring counters."""
    source = torch.full((100_000,), 1.0 + 2**-9 + 2**-8)
    first, second = (copy(source, counter=counter).double() for counter in (0, 1))
    for a, b in [(first[:-lag], first[lag:]) for lag in (1, 2, 4, 8)] + [(first, second)]:
        assert abs(torch.corrcoef(torch.stack((a, b)))[0, 1]) < 5 / 100_000**0.5
