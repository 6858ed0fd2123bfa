"""Float8 rows' scales in Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.float8.casts import E4M3, MIN_SCALE_EXPONENT, ROUND_UP, SCALE_BIAS

UP, BIAS, LEAST = (tl.constexpr(number) for number in (ROUND_UP, SCALE_BIAS, MIN_SCALE_EXPONENT))


INFINITY = tl.constexpr(0x7F800000)
"""Infinity's bits in float32."""


@triton.jit
def get_magnitude_bits(values):
    """Return absolute values' bits in float32, integers in the values' order, with NaN above infinity."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def compute_scale_and_inverse(largest):
    """Return a largest magnitude's scale and its inverse, both powers with base two; NaN if it is not finite."""
    exponent = tl.maximum(((largest + UP) >> 23) - BIAS, LEAST)
    is_finite = largest < INFINITY
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_finite, scale, float("nan")), tl.where(is_finite, inverse, float("nan"))


def allocate_quantized_rows(x: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return empty float8 elements (rows, width) and scales (rows,) on the device of x (any shape)."""
    return x.new_empty(rows, width, dtype=E4M3), x.new_empty(rows, dtype=torch.float32)
