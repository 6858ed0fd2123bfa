"""
Float8: casts to e4m3 elements with a power-of-two scale per row, and products of such matrices.

`linear.py` explains the recipe. A row with a number that is not finite gets a NaN scale, and nothing is clamped.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drawloom.kernels.rms_norm import rms_norm_eager
from drawloom.kernels.swiglu import compute_swiglu_gradients, swiglu_halves_eager

E4M3 = torch.float8_e4m3fn
ALIGNMENT = 16
"""Both widths in a product must be multiples."""

MIN_CAPABILITY = (8, 9)
"""Minimum compute capability for float8 products: Ada; Hopper has 9.0."""

SCALE_BIAS = 8
"""Exponent in the largest e4m3 number: for a row maximum m * 2^e, the scale is 2^(e - 8) or 2^(e - 7)."""

ROUND_UP = 0x1FFFFF
"""Added to float32 bits, it carries into the exponent if the mantissa is above 1.75, as in 448."""

MIN_SCALE_EXPONENT = 27
"""Smallest biased exponent for a scale, 2^-100: a row with zeros gets it, and its inverse is finite."""


def lacks_float8(device: torch.device) -> bool:
    """Return whether a device is a GPU without float8; a plan for another machine's GPU assumes float8."""
    is_here = device.type == "cuda" and torch.cuda.is_available()
    return is_here and torch.cuda.get_device_capability(device) < MIN_CAPABILITY


class ScaledRows(NamedTuple):
    """Quantized rows: `data` e4m3 (rows, width) times `scale` float32 (rows,), or (experts,) for experts' matrices."""

    data: Tensor
    scale: Tensor


class Float8Rows(NamedTuple):
    """
    Quantized rows: `data` e4m3 (rows, width) times `scale` float32 (rows,).

    `transposed` is data.T, e4m3 (width, padded rows), padded with zeros to a multiple; it is empty if not requested.
    """

    data: Tensor
    scale: Tensor
    transposed: Tensor


class NormedRows(NamedTuple):
    """A norm and its input, both (..., width), and the norm's quantized rows, without a copy."""

    normed: Tensor
    summed: Tensor
    rows: Float8Rows


class QuantizedGradient(NamedTuple):
    """
    Quantized gradient: by rows, `data` (tokens, outputs) times `scale` (tokens,), and transposed, `columns` (outputs,
    padded tokens) times `column_scale` (outputs,); the last two are empty if they were not requested.
    """

    data: Tensor
    scale: Tensor
    columns: Tensor
    column_scale: Tensor


def compute_power_of_two_scales(largest: Tensor) -> Tensor:
    """
    Return power-of-two divisors for rows with these largest magnitudes, float32 (rows,).

    Quotients are at most 448, e4m3's largest number, so none is clamped. NaN if the magnitude is not finite.
    """
    exponent = ((largest.view(torch.int32) + ROUND_UP) >> 23) - SCALE_BIAS
    scale = (exponent.clamp_min(MIN_SCALE_EXPONENT) << 23).view(torch.float32)
    return scale.masked_fill(~largest.isfinite(), torch.nan)


def allocate_quantized_weights(weights: Sequence[Tensor]) -> Float8Rows:
    """Allocate float8 rows for weights (outputs, inputs), concatenated along outputs, and a transposed copy."""
    outputs, inputs = sum(map(len, weights)), weights[0].shape[1]
    data, transposed = (weights[0].new_empty(shape, dtype=E4M3) for shape in ((outputs, inputs), (inputs, outputs)))
    return Float8Rows(data, weights[0].new_empty(outputs, dtype=torch.float32), transposed)


def compute_padded_row_count(rows: int) -> int:
    """Return a row count, rounded up to the alignment of transposed copies."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


def _transpose_rows(data: Tensor) -> Tensor:
    """Transpose e4m3 (rows, width) to (width, padded rows)."""
    result = data.new_zeros(data.shape[1], compute_padded_row_count(len(data)))
    result[:, : len(data)] = data.t()
    return result


class Float8Kernels:
    """
    Casts and products in float8, here in plain torch, with operands widened to float32; Triton's class derives from it.

    All matrices have contiguous rows, and all scales are float32.
    """

    def quantize_rows(self, x: Tensor, transposed: bool) -> Float8Rows:
        """Quantize x (rows, width) by rows, with or without a transposed copy."""
        wide = x.float()
        scale = compute_power_of_two_scales(wide.abs().amax(1))
        data = (wide / scale[:, None]).to(E4M3)
        return Float8Rows(data, scale, _transpose_rows(data) if transposed else data.new_empty(0))

    def dequantize_rows(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        """Return data * scale[:, None] in a dtype: data (rows, width), scale (rows,); exact but in float16."""
        return data.to(dtype).mul_(scale[:, None])

    def transpose(self, data: Tensor) -> Tensor:
        """Transpose e4m3 (rows, width) to (width, padded rows)."""
        return _transpose_rows(data)

    def quantize_weights(self, weights: Sequence[Tensor]) -> ScaledRows:
        """Quantize weights (outputs, inputs) by rows: data (all outputs, inputs) and scale (all outputs,)."""
        rows = self.quantize_rows(torch.cat([*weights]), False)
        return ScaledRows(rows.data, rows.scale)

    def quantize_transposed_weights(self, weights: Sequence[Tensor], scale: Tensor) -> Tensor:
        """Quantize weights (outputs, inputs) with scales (all outputs,): e4m3 (inputs, all outputs)."""
        return _transpose_rows((torch.cat([*weights]).float() / scale[:, None]).to(E4M3))

    def quantize_weights_into(self, weights: Sequence[Tensor], rows: Float8Rows) -> None:
        """Fill `rows` with the elements, scales and transposed copy of weights (outputs, inputs)."""
        for target, source in zip(rows, self.quantize_rows(torch.cat([*weights]), True), strict=True):
            target.copy_(source)

    def quantize_swiglu(self, gate_and_up: Tensor, transposed: bool) -> Float8Rows:
        """Quantize silu(gate) * up by rows, where gate and up are halves: `gate_and_up` (rows, 2 * width)."""
        return self.quantize_rows(swiglu_halves_eager(gate_and_up.float()), transposed)

    def quantize_swiglu_gradient(
        self, grad: Tensor, gate_and_up: Tensor, factor: Tensor, row_scale: Tensor | None
    ) -> QuantizedGradient:
        """
        Quantize `gate_and_up`'s gradient like `quantize_gradient`: grad (tokens, width) is for silu(gate) * up, and
        factor (2 * width,).
        """
        gate, up = gate_and_up.float().chunk(2, -1)
        return self.quantize_gradient(compute_swiglu_gradients(grad, gate, up), factor, row_scale)

    def quantize_gradient(self, grads: Sequence[Tensor], factor: Tensor, row_scale: Tensor | None) -> QuantizedGradient:
        """
        Quantize grad * factor by rows: up to three gradients (tokens, outputs) side by side, factor (all outputs,).

        With row_scale (tokens,), also quantize grad * row_scale[:, None] by columns.
        """
        data, scale, empty = self.quantize_rows(torch.cat([*grads], 1).float() * factor, False)
        if row_scale is None:
            return QuantizedGradient(data, scale, empty.view(0, 0), scale.new_empty(0))
        shifted = data.float() * (scale * row_scale)[:, None]
        column_scale = compute_power_of_two_scales(shifted.abs().amax(0))
        return QuantizedGradient(data, scale, _transpose_rows((shifted / column_scale).to(E4M3)), column_scale / factor)

    def norm(self, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """Apply RMSNorm to x (..., width), times the weight (width,), or times 1 + weight."""
        return rms_norm_eager(x, weight, eps, zero_centered)

    def norm_and_quantize(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
    ) -> NormedRows:
        """Apply `norm` to x + residual, or to x, and quantize it by rows."""
        summed = x if residual is None else (x + residual).to(x.dtype)
        normed = self.norm(summed, weight, eps, zero_centered)
        return NormedRows(normed, summed, self.quantize_rows(normed.detach().flatten(0, -2), False))

    def multiply_scaled(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor | None, fast: bool) -> Tensor:
        """
        Return a @ b.T, bfloat16 (rows, columns), times a_scale (rows,) and b_scale (columns,): a (rows, inner),
        b (columns, inner).
        """
        product = a.float() @ b.float().t() * a_scale[:, None]
        return (product if b_scale is None else product * b_scale).bfloat16()


EAGER = Float8Kernels()
