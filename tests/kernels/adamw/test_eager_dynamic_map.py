"""8-bit codes against bitsandbytes' maps and the nearest values in numpy."""

import hashlib

import numpy as np
import pytest
import torch

from drawloom.kernels.adamw.eager import (
    BLOCK,
    ZERO_CODE,
    compute_code_values,
    compute_scales_shape,
    decode_8bit,
    encode_8bit,
)

BITSANDBYTES = {
    True: "e732639a65f497b4ad684bb166a4467708255edd5207757de8b8f0c7e1fda89c",
    False: "305f002cc11278fb769d13b25b9fd0c7c83c8402c40a878fe086f4039fde6398",
}
"""SHA-256 for `create_dynamic_map` in bitsandbytes 0.50.2, by sign."""


@pytest.mark.parametrize("signed", [True, False])
def test_maps_have_the_bits_of_bitsandbytes(signed: bool) -> None:
    """All 256 values equal bitsandbytes', and zero has its code."""
    values = compute_code_values(signed)
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == BITSANDBYTES[signed]
    assert values[ZERO_CODE if signed else 0] == 0


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("width", [5, 256, 300])
def test_codes_are_the_nearest_in_blocks_of_rows(signed: bool, width: int) -> None:
    """A block's scale is its largest magnitude, and every code is nearest, in a numpy loop; zeros stay zero."""
    numbers = torch.randn(3, width) * torch.tensor([[1e-6], [1.0], [0.0]])
    numbers = numbers if signed else numbers.square()
    codes, scales = encode_8bit(numbers, signed)
    assert scales.shape == compute_scales_shape((3, width))
    table, decoded = compute_code_values(signed).numpy(), decode_8bit(codes, scales, signed)
    for row in range(3):
        for start in range(0, width, BLOCK):
            block = numbers[row, start : start + BLOCK].numpy()
            scale = np.abs(block).max()
            assert scales[row, start // BLOCK] == scale
            gaps = np.abs(table[codes[row, start : start + BLOCK].numpy()] - block / max(scale, np.float32(1e-38)))
            nearest = np.abs(table[None, :] - (block / max(scale, np.float32(1e-38)))[:, None]).min(1)
            assert np.array_equal(gaps, nearest)
    assert not decoded[2].any()


def test_codes_of_a_slice_of_rows_are_a_slice() -> None:
    """Rows, and whole blocks of columns, have the same codes and scales alone."""
    numbers = torch.randn(6, 700)
    codes, scales = encode_8bit(numbers, True)
    part, part_scales = encode_8bit(numbers[2:4, BLOCK:], True)
    assert torch.equal(part, codes[2:4, BLOCK:]) and torch.equal(part_scales, scales[2:4, 1:])
