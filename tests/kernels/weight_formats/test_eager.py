"""Quantized formats against numpy and bitsandbytes, and slices against whole weights."""

import hashlib

import numpy as np
import pytest
import torch
from torch import Tensor

from drawloom.kernels.weight_formats.eager import FLOAT8, FORMATS, FP4_VALUES, MXFP4, NF4, NF4_VALUES, WeightFormat

NAMES = sorted(FORMATS)
BITSANDBYTES = "018a183aa8d5d4b4d1afc15052e711ed1c603f92733cf1c6e256d7b8cbae025f"
"""SHA-256 for the test's weight, by `quantize_nf4` in bitsandbytes 0.50.2 on a CPU: codes, then scales."""


def weights(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers in bfloat16, with rows of different sizes, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    weight *= torch.exp2(torch.randint(-8, 8, (*shape[:-1], 1), generator=generator))
    weight[..., 1, :128] = 0
    return weight.bfloat16()


def test_nf4_has_the_bits_of_bitsandbytes() -> None:
    """Codes, the first in a byte's upper half, and scales equal those by bitsandbytes."""
    codes, scales = NF4.unpack_storage(NF4.quantize(weights(48, 320)))
    digest = hashlib.sha256(codes.numpy().tobytes() + scales.numpy().tobytes()).hexdigest()
    assert digest == BITSANDBYTES


def test_nf4_takes_the_nearest_value() -> None:
    """Codes are the nearest values relative to the largest magnitude among 64, in a numpy loop."""
    weight = weights(3, 128)
    table = np.array(NF4_VALUES, np.float32)
    values = NF4.dequantize(NF4.quantize(weight)).float().numpy()
    for row, found in zip(weight.float().numpy(), values, strict=True):
        for start in range(0, len(row), 64):
            block = row[start : start + 64]
            scale = np.abs(block).max()
            nearest = [table[np.argmin(np.abs(table - x / scale))] if scale else np.float32(0) for x in block]
            expected = torch.from_numpy(np.array(nearest, np.float32) * scale).bfloat16().float().numpy()
            assert np.array_equal(found[start : start + 64], expected)


def test_float8_has_one_scale_for_a_tile() -> None:
    """Every 128 x 128 tile, and the last smaller one, has the scale max / 448 and the nearest e4m3 numbers."""
    weight = weights(200, 256)
    codes, scales = FLOAT8.unpack_storage(FLOAT8.quantize(weight))
    for rows in (slice(0, 128), slice(128, 200)):
        for number, columns in enumerate((slice(0, 128), slice(128, 256))):
            tile = weight[rows, columns].float()
            scale = tile.abs().max() / 448
            assert torch.equal(scales[rows, number], scale.expand(len(tile)))
            nearest = (tile / scale).to(torch.float8_e4m3fn)
            assert torch.equal(codes[rows, number].view(torch.float8_e4m3fn).float(), nearest.float())


def test_mxfp4_values_survive_and_ties_go_to_the_even_code() -> None:
    """Values times any power of two are exact, and halfway points round as in IEEE 754."""
    exponents = torch.arange(-20, 20).float()
    exact = torch.exp2(exponents)[:, None] * torch.tensor(FP4_VALUES * 2)
    assert torch.equal(MXFP4.dequantize(MXFP4.quantize(exact)).float(), exact)
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 4.0] * 4)
    rounded = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0] * 4)
    assert torch.equal(MXFP4.dequantize(MXFP4.quantize(halfway[None])).float()[0], rounded)


@pytest.mark.parametrize("name", NAMES)
def test_slices_of_storage_are_slices_of_the_weight(name: str) -> None:
    """Rows, experts and whole column blocks can be cut before or after dequantizing."""
    weight_format = FORMATS[name]
    stored = weight_format.quantize(weights(4, 150, 384))
    values = weight_format.dequantize(stored)
    assert stored.shape == weight_format.storage_shape((4, 150, 384))
    assert weight_format.weight_shape(tuple(stored.shape)) == (4, 150, 384)
    columns = slice(128 // weight_format.block * weight_format.units, None)
    part = weight_format.dequantize(stored[1:3, 37:, columns])
    assert torch.equal(part, values[1:3, 37:, 128:])


@pytest.mark.parametrize("name", NAMES)
def test_quantizing_again_changes_nothing(name: str) -> None:
    """Dequantized weights are quantized to the same values up to bfloat16 rounding, so errors do not grow."""
    weight_format = FORMATS[name]
    values = weight_format.dequantize(weight_format.quantize(weights(130, 256))).float()
    again = weight_format.dequantize(weight_format.quantize(values)).float()
    assert (again - values).abs().max() <= 2**-8 * values.abs().max()


@pytest.mark.parametrize("weight_format", FORMATS.values(), ids=NAMES)
def test_rows_of_broken_blocks_are_refused(weight_format: WeightFormat) -> None:
    """A width that no block divides is an error with both numbers."""
    with pytest.raises(ValueError, match=f"rows of 300 elements can't be divided into blocks of {weight_format.block}"):
        weight_format.quantize(weights(2, 300))
