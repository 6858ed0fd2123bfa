"""Dequantized weights in Triton against the eager ones, bit by bit."""

import pytest
import torch

from drawloom.kernels.weight_formats.eager import FORMATS, dequantize_eager
from drawloom.kernels.weight_formats.triton import dequantize_triton
from support.kernels import DEVICE

SHAPES = [(1, 128), (3, 384), (40, 512), (2, 3, 128)]


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_equal_eager_bits(name: str, shape: tuple[int, ...]) -> None:
    """Any block count has the eager bits, also if storage is aligned to two bytes only."""
    weight = torch.randn(shape) * torch.exp2(torch.randint(-30, 30, (*shape[:-1], 1)))
    weight[..., -1, :32] = 0
    stored = FORMATS[name].quantize(weight).to(DEVICE)
    shifted = torch.cat([stored.new_zeros(1), stored.flatten()])[1:].view(stored.shape)
    expected = dequantize_eager(stored, name)
    for storage in (stored, shifted):
        result = dequantize_triton(storage, name)
        assert result.shape == weight.shape
        assert torch.equal(result.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_code_has_its_value(name: str) -> None:
    """All codes but e4m3's NaN, with positive and negative scales, have the same bits."""
    weight_format = FORMATS[name]
    size = weight_format.units * 2 - weight_format.scale_dtype.itemsize
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(size).view(256, 1, size)
    codes[(codes & 127) == 127] = 1
    scales = torch.linspace(-3, 3, 256)[:, None]
    stored = weight_format.pack_storage(codes, scales.to(weight_format.scale_dtype)).to(DEVICE)
    result, expected = dequantize_triton(stored, name), dequantize_eager(stored, name)
    assert torch.equal(result.view(torch.int16), expected.view(torch.int16))
