"""Scaling many tensors in one launch is bitwise equal to the eager implementation."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.kernels.gradients.eager import scale_and_sum_squares_eager
from drawloom.kernels.gradients.triton import BLOCK, PART, scale_and_sum_squares_triton
from support.kernels import DEVICE, few
from support.seeding import seeds

sizes = st.sampled_from([0, 1, 7, 300, BLOCK - 1, BLOCK, 2 * BLOCK + 5, PART, PART + 5])
dtypes = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])


@few
@given(seeds, st.lists(sizes, max_size=5), dtypes, st.floats(-3, 3), st.integers(0, 8))
def test_triton_has_the_bits_of_eager(
    _seed: object, lengths: list[int], dtype: torch.dtype, factor: float, offset: int
) -> None:
    """
    For any sizes and addresses, bits equal the eager implementation's and nothing beside them changes; sums of squares
    agree up to float64's rounding.
    """
    made = [torch.randn(2, length, device=DEVICE).to(dtype) for length in lengths]
    memory = torch.randn(offset + 100, device=DEVICE).to(dtype)
    actual = [*made, memory[offset : offset + 50]]
    unchanged, expected = memory.clone(), [tensor.clone() for tensor in actual]
    number = torch.tensor(factor, dtype=torch.float64, device=DEVICE)
    counted = tuple(index % 3 != 1 for index in range(len(actual)))
    squares = scale_and_sum_squares_triton(actual, number, counted)
    torch.testing.assert_close(squares, scale_and_sum_squares_eager(expected, number, counted), rtol=1e-13, atol=0)
    assert all(torch.equal(one, other) for one, other in zip(actual, expected, strict=True))
    unchanged[offset : offset + 50] = expected[-1]
    assert torch.equal(memory, unchanged)


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_factor_of_1_leaves_tensors_alone(factor: float) -> None:
    """Only another factor writes tensors, which a NaN shows: a product has the processor's own NaN."""
    bits = torch.full((BLOCK + 5,), 0x7FC1, dtype=torch.int16, device=DEVICE)
    scale_and_sum_squares_triton(
        [bits.view(torch.bfloat16)], torch.tensor(factor, dtype=torch.float64, device=DEVICE), (False,)
    )
    assert (bits == 0x7FC1).all() if factor == 1 else (bits != 0x7FC1).all()


@pytest.mark.parametrize("value", [math.inf, math.nan, 3e38, 1e-38])
def test_squares_neither_overflow_nor_hide_nan(value: float) -> None:
    """Squares of the largest and smallest float32 are summed; infinities and NaN show if they are counted."""
    tensors = [torch.full((BLOCK + 3,), fill, device=DEVICE) for fill in (value, 1.0)]
    one = torch.ones((), dtype=torch.float64, device=DEVICE)
    expected = (BLOCK + 3) * float(torch.tensor(value)) ** 2
    assert scale_and_sum_squares_triton(tensors, one, (True, False)).item() == pytest.approx(
        expected, rel=1e-14, nan_ok=True
    )
    assert scale_and_sum_squares_triton(tensors, one, (False, True)).item() == BLOCK + 3
