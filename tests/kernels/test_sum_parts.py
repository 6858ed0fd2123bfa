"""Sums over a few rows of numbers of 16 bits."""

import pytest
import torch

from drawloom.kernels.sum_parts import sum_parts_eager
from drawloom.kernels.triton.sum_parts import sum_parts_triton
from support.kernels import DEVICE


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 7, 5000, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_rounded_once(rows: int, size: int, dtype: torch.dtype) -> None:
    """Each sum is that of float64, rounded once: numbers that a narrow sum would swallow count."""
    generator = torch.Generator().manual_seed(rows * size)
    # Multiples of 1/8 below 4, and 256: every partial sum is a float32 number, whatever the order.
    parts = (torch.randint(-31, 32, (rows, size), generator=generator) / 8).to(dtype).to(DEVICE)
    parts[0, ::3] = 256.0
    expected = parts.double().sum(0).to(dtype)
    for summed in (sum_parts_eager, sum_parts_triton):
        out = torch.full((size,), torch.nan, dtype=dtype, device=DEVICE)
        summed(parts, out)
        assert torch.equal(out, expected)
