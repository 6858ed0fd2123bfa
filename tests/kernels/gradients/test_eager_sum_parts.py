"""Sums over a few rows of 16-bit numbers."""

from pathlib import Path

import pytest
import torch

from drawloom.kernels.gradients.eager import sum_parts_eager
from drawloom.kernels.gradients.triton import BLOCK, _sum_parts_kernel, sum_parts_triton
from support.kernels import DEVICE


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("size", [0, 7, 5000, 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_rounded_once(rows: int, size: int, dtype: torch.dtype) -> None:
    """Sums equal float64, rounded once: numbers that a 16-bit sum would lose count."""
    generator = torch.Generator().manual_seed(rows * size)
    # Multiples of 1/8 below 4, and 256: every partial sum is a float32 number, whatever the order.
    parts = (torch.randint(-31, 32, (rows, size), generator=generator) / 8).to(dtype).to(DEVICE)
    parts[0, ::3] = 256.0
    expected = parts.double().sum(0).to(dtype)
    apart = torch.full((rows, size + 3), torch.nan, dtype=dtype, device=DEVICE)
    apart[:, :size] = parts
    for summed in (sum_parts_eager, sum_parts_triton):
        for others in (parts[1:], apart[1:, :size]):
            out = torch.full((size,), torch.nan, dtype=dtype, device=DEVICE)
            summed(parts[0], others, out)
            assert torch.equal(out, expected)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="one program alone is launched by Triton's interpreter")
def test_rows_beyond_32_bits_are_read(tmp_path: Path) -> None:
    """A row that begins 2^31 elements after the first row is added, and not the row at a wrapped offset."""
    rows, size = 3, 2**30
    # An empty file takes no memory, and has room for an offset of -2^31, where all numbers are 0.
    memory = torch.from_file(str(tmp_path / "parts"), shared=True, size=2**31 + rows * size, dtype=torch.bfloat16)
    parts, out = memory[2**31 :], torch.zeros(BLOCK, dtype=torch.bfloat16)
    for row in range(rows):
        parts[row * size :][:BLOCK] = 2.0**row
    own = torch.full_like(out, 8.0)
    _sum_parts_kernel[(1,)](own, parts, size, out, size, ROWS=rows, BLOCK=BLOCK, num_warps=4)
    assert torch.equal(out, torch.full_like(out, 15.0))
