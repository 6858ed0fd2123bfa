"""
Linear layers with matrix products in float8: e4m3 elements, and a power-of-two scale per row.

Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv 2209.05433, but with row scales. x (tokens, inputs) and
the weight (outputs, inputs) are rounded once, by rows, for y = x @ weight.T. The backward pass uses the same elements,
although a product can be scaled only along the dimensions it keeps:

- grad_x = (grad * weight_scale) @ weight_elements: weight scales multiply the gradient before rounding;
- grad_weight = (grad * x_scale).T @ x_elements: x scales multiply the rounded gradient, and its columns get their own
  scales. A factor 2^n shifts exponents, so the gradient is rounded once, too; only elements 2^15 times
  smaller than their column's largest lose bits.

Tensor cores multiply float8 along contiguous dimensions, so the backward pass needs transposed copies. A row with a
number that is not finite gets a NaN scale, so the gradient norm is NaN, and nothing is clamped. Only the forward pass
accumulates fast: Hopper's tensor cores keep 14 bits, too few to sum 10,000 tokens.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.deferred_grads import Addable, WeightGradient, deferring, weight_gradient_of
from drawloom.kernels.operation import once_differentiable
from drawloom.kernels.recompute import cheap

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


class Float8Rows(NamedTuple):
    """
    Rounded rows: `data` e4m3 (rows, width) times `scale` float32 (rows,).

    `transposed` is data.T, e4m3 (width, padded rows), padded with zeros to a multiple; it is empty if not requested.
    """

    data: Tensor
    scale: Tensor
    transposed: Tensor


class Gradient(NamedTuple):
    """
    Rounded gradient: by rows, `data` (tokens, outputs) times `scale` (tokens,), and transposed, `columns` (outputs,
    padded tokens) times `column_scale` (outputs,); the last two are empty if they were not requested.
    """

    data: Tensor
    scale: Tensor
    columns: Tensor
    column_scale: Tensor


class Float8Kernels(Protocol):
    """Casts and products in float8; all matrices have contiguous rows, and all scales are float32."""

    def quantize(self, x: Tensor, transposed: bool) -> Float8Rows:
        """Round x (rows, width) by rows, with or without a transposed copy."""
        ...

    def transpose(self, x: Tensor, scale: Tensor) -> Tensor:
        """Round x (rows, width) with the scales (rows,) from `quantize`: e4m3 (width, rows)."""
        ...

    def quantize_gradient(self, grad: Tensor, factor: Tensor, row_scale: Tensor | None) -> Gradient:
        """
        Round grad * factor by rows: grad (tokens, outputs), factor (outputs,).

        With row_scale (tokens,), also round grad * row_scale[:, None] by columns.
        """
        ...

    def multiply(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor | None, fast: bool) -> Tensor:
        """
        Return a @ b.T, bfloat16 (rows, columns), times a_scale (rows,) and b_scale (columns,): a (rows, inner),
        b (columns, inner).
        """
        ...


def scale_of(largest: Tensor) -> Tensor:
    """
    Return power-of-two divisors for rows with these largest magnitudes, float32 (rows,).

    Quotients are at most 448, e4m3's largest number, so none is clamped. NaN if the magnitude is not finite.
    """
    exponent = ((largest.view(torch.int32) + ROUND_UP) >> 23) - SCALE_BIAS
    scale = (exponent.clamp_min(MIN_SCALE_EXPONENT) << 23).view(torch.float32)
    return scale.masked_fill(~largest.isfinite(), torch.nan)


def round_up_rows(rows: int) -> int:
    """Return the padded row count for a transposed copy."""
    return -(-rows // ALIGNMENT) * ALIGNMENT


def _transpose_rows(data: Tensor) -> Tensor:
    """Transpose e4m3 (rows, width) to (width, padded rows)."""
    result = data.new_zeros(data.shape[1], round_up_rows(len(data)))
    result[:, : len(data)] = data.t()
    return result


class EagerFloat8:
    """Casts and products in plain torch: operands are widened to float32."""

    def quantize(self, x: Tensor, transposed: bool) -> Float8Rows:
        wide = x.float()
        scale = scale_of(wide.abs().amax(1))
        data = (wide / scale[:, None]).to(E4M3)
        return Float8Rows(data, scale, _transpose_rows(data) if transposed else data.new_empty(0))

    def transpose(self, x: Tensor, scale: Tensor) -> Tensor:
        return _transpose_rows((x.float() / scale[:, None]).to(E4M3))

    def quantize_gradient(self, grad: Tensor, factor: Tensor, row_scale: Tensor | None) -> Gradient:
        data, scale, empty = self.quantize(grad.float() * factor, False)
        if row_scale is None:
            return Gradient(data, scale, empty.view(0, 0), scale.new_empty(0))
        shifted = data.float() * (scale * row_scale)[:, None]
        column_scale = scale_of(shifted.abs().amax(0))
        return Gradient(data, scale, _transpose_rows((shifted / column_scale).to(E4M3)), column_scale / factor)

    def multiply(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor | None, fast: bool) -> Tensor:
        product = a.float() @ b.float().t() * a_scale[:, None]
        return (product if b_scale is None else product * b_scale).bfloat16()


EAGER: Float8Kernels = EagerFloat8()


def linear_float8_eager(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """
    Return x @ weight.T + bias (..., outputs), multiplied in float8: x (..., inputs), weight (outputs, inputs), bias
    (outputs,), all bfloat16.
    """
    return linear_float8(EAGER, x, weight, bias)


def linear_float8(kernels: Float8Kernels, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute linear_float8_eager with these kernels; layers with the same tensor x round it once."""
    check_operands(x, weight)
    rows = _rows_of(kernels, x, transposed=weight.requires_grad and torch.is_grad_enabled())
    gradient = weight_gradient_of(weight)
    result: Tensor = _LinearFloat8.apply(x, weight, bias, gradient, kernels, *rows)  # type: ignore[no-untyped-call]
    return result


def check_operands(x: Tensor, weight: Tensor) -> None:
    """Raise TypeError unless operands are bfloat16, and ValueError for unsuitable widths."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise TypeError(f"products in float8 round bfloat16 operands, and these are {x.dtype} and {weight.dtype}")
    if any(width % ALIGNMENT for width in weight.shape):
        raise ValueError(f"a weight {tuple(weight.shape)} has a width that is not divisible by {ALIGNMENT}")


@dataclass(frozen=True)
class _Rounded:
    """Rounded rows, and the version their tensor had."""

    rows: Float8Rows
    version: int


def _rows_of(kernels: Float8Kernels, x: Tensor, transposed: bool) -> Float8Rows:
    """Round x (..., width) by rows, and keep the result as long as x lives."""
    if x.is_inference():  # without a version
        return _quantize(kernels, x, transposed)
    known: _Rounded | None = getattr(x, "float8", None)
    if known is None or known.version != x._version or (transposed and not known.rows.transposed.numel()):
        known = _Rounded(Float8Rows(*cheap(_quantize, kernels, x, transposed)), x._version)
        x.float8 = known  # type: ignore[attr-defined]
    return known.rows


def _quantize(kernels: Float8Kernels, x: Tensor, transposed: bool) -> Float8Rows:
    with torch.no_grad():
        return kernels.quantize(x.reshape(-1, x.shape[-1]), transposed)


@deferring
class _LinearFloat8(Function):
    """Linear layer; it saves its input in float8, and can defer its weight gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        weight_gradient: WeightGradient,
        kernels: Float8Kernels,
        data: Tensor,
        scale: Tensor,
        transposed: Tensor,
    ) -> Tensor:
        """Return (..., outputs): x (..., inputs), weight (outputs, inputs), bias (outputs,), and x's `Float8Rows`."""
        rounded = kernels.quantize(weight, transposed=False)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(weight if needs_x else None, rounded.scale, scale, transposed if needs_weight else None)
        ctx.weight_gradient, ctx.kernels, ctx.inputs_shape = weight_gradient, kernels, x.shape
        y = kernels.multiply(data, scale, rounded.data, rounded.scale, fast=True)
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, weight_scale, x_scale, transposed = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        kernels: Float8Kernels = ctx.kernels
        rows = grad.reshape(-1, grad.shape[-1])
        rounded = kernels.quantize_gradient(rows, weight_scale, x_scale if needs_weight else None)
        grad_x = grad_weight = None
        if needs_x:
            elements = kernels.transpose(weight, weight_scale)
            grad_x = kernels.multiply(rounded.data, rounded.scale, elements, None, fast=False).view(ctx.inputs_shape)
        if needs_weight:
            factors = rounded.columns, rounded.column_scale, transposed.detach()
            grad_weight = ctx.weight_gradient(_WeightGradient(kernels), *factors)
        grad_bias = rows.sum(0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


@dataclass(frozen=True)
class _WeightGradient(Addable):
    """Weight gradient: the product e4m3 (outputs, tokens) @ (inputs, tokens).T, times a scale (outputs,)."""

    kernels: Float8Kernels

    def __call__(self, grad: Tensor, scale: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.kernels.multiply(grad, scale, x, None, fast=False)

    def in_dtype(self, dtype: torch.dtype, grad: Tensor, scale: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return self(grad, scale, x).to(dtype)

    def add_to(self, summed: Tensor, grad: Tensor, scale: Tensor, x: Tensor) -> None:  # type: ignore[override]
        # In Triton, a fused product and addition took longer than both launches.
        summed += self(grad, scale, x)
