"""
8-bit numbers for an optimizer's running means, in blocks along a row; every block has a scale.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", arXiv 2110.02861, section 2; values have
bitsandbytes' bits. A code stands for a value from -1 or 0 to 1; the spacing grows with the magnitude. Blocks (256
elements) begin anew in every row, so slicing rows changes neither codes nor scales.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 256
"""Elements of a row with a common scale."""

CODES = 256
DECADES = 7
ZERO_CODE = 127
"""Code of 0 in the map with signs; 0 in the other."""

SMALLEST = 1e-38
"""Divisor of blocks of zeros."""


def compute_code_values(signed: bool) -> Tensor:
    """
    Return the values by code, ascending, float32 (256,): in the decade 10^-n, 2^(6 - n) values, or twice as many if no
    code has a sign, and 0 and 1.
    """
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1)
        centres: list[float] = (10.0 ** (decade + 1 - DECADES) * ((edges[:-1] + edges[1:]) / 2)).tolist()
        values += centres + [-centre for centre in centres if signed]
    return torch.tensor(sorted(values))


@cache
def compute_values_and_midpoints(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the float32 values of all codes (256,), ascending, and the midpoints between neighbours (255,)."""
    values = compute_code_values(signed)
    return values.to(device), ((values[:-1] + values[1:]) / 2).to(device)


def compute_scales_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales, (..., blocks), for numbers with a shape (..., width)."""
    return (*shape[:-1], -(-shape[-1] // BLOCK))


def decode_8bit(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return float32 (rows, width) for codes uint8 (rows, width) and scales float32 (rows, blocks)."""
    values, _ = compute_values_and_midpoints(signed, codes.device)
    return values[codes.int()] * scales.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]


class EightBitCodes(NamedTuple):
    """Codes uint8 (rows, width), and their blocks' scales float32 (rows, blocks)."""

    codes: Tensor
    scales: Tensor


def encode_8bit(numbers: Tensor, signed: bool) -> EightBitCodes:
    """Return the nearest codes to numbers, float32 (rows, width)."""
    _, midpoints = compute_values_and_midpoints(signed, numbers.device)
    rows, width = numbers.shape
    padded = F.pad(numbers, (0, -width % BLOCK)).view(rows, -1, BLOCK)
    scales = padded.abs().amax(2)
    codes = torch.bucketize(padded / scales.clamp_min(SMALLEST).unsqueeze(2), midpoints, out_int32=True)
    return EightBitCodes(codes.to(torch.uint8).view(rows, -1)[:, :width].contiguous(), scales)
