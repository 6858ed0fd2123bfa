"""
Casts to float8 in Triton; cuBLAS multiplies.

A cast by rows keeps whole rows in registers. Transposed copies are made tile by tile from rounded elements. Tensors in
bfloat16 are read once, except weights: they are cast again for the backward pass and not kept.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.costs import no_flops, no_scratch
from drawloom.kernels.float8 import (
    E4M3,
    MIN_SCALE_EXPONENT,
    ROUND_UP,
    SCALE_BIAS,
    Float8Kernels,
    Float8Rows,
    Gradient,
    linear_float8,
    round_up_rows,
)
from drawloom.kernels.operation import register_kernel
from drawloom.kernels.triton.launch import lean
from drawloom.kernels.triton.primitives import as_rows, cdiv, next_power_of_2, sm_count

WARPS_PER_SM, WARPS_WITH_COLUMNS = 32, 16
"""
Warps per multiprocessor for a cast by rows, without and with column maxima: more programs would write more partial
results.
"""

TOKENS, CHANNELS = 128, 128
"""Float8Rows and columns in a program's transposed tile."""


def linear_float8_triton(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """
    Compute linear_float8_eager on GPUs with float8: x (..., inputs), weight (outputs, inputs), bias (outputs,).
    """
    return linear_float8(TRITON, x, weight, bias)


class TritonFloat8:
    """Casts in Triton, and products by `torch._scaled_mm`."""

    def quantize(self, x: Tensor, transposed: bool) -> Float8Rows:
        data, scale = _quantize(x)
        return Float8Rows(data, scale, _transpose(data, None) if transposed else data.new_empty(0))

    def transpose(self, x: Tensor, scale: Tensor) -> Tensor:
        return _transpose(x, scale)  # type: ignore[no-any-return]

    def quantize_gradient(self, grad: Tensor, factor: Tensor, row_scale: Tensor | None) -> Gradient:
        return Gradient(*_quantize_gradient(grad, factor, row_scale))

    def multiply(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor | None, fast: bool) -> Tensor:
        columns = _ones(b) if b_scale is None else b_scale
        if not a.numel():
            return a.new_zeros(len(a), len(b), dtype=torch.bfloat16)
        return torch._scaled_mm(
            a, b.t(), a_scale[:, None], columns[None, :], out_dtype=torch.bfloat16, use_fast_accum=fast
        )


TRITON: Float8Kernels = TritonFloat8()

ONES = 2**17
"""Length for a vector with ones, the scales for transposed elements."""


def _ones(b: Tensor) -> Tensor:
    """Return ones (columns,) for b (columns, inner)."""
    if b.is_cuda and type(b) is Tensor and len(b) <= ONES:
        return _many_ones(b.device)[: len(b)]
    return torch.ones(len(b), device=b.device)


@cache
def _many_ones(device: torch.device) -> Tensor:
    return torch.ones(ONES, device=device)


def _like_quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=E4M3), x.new_empty(len(x), dtype=torch.float32)


@register_kernel(
    "float8_quantize(Tensor x) -> (Tensor, Tensor)", fake=_like_quantized, flops=no_flops, scratch=no_scratch
)
def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    data, scale = _like_quantized(x)
    if data.is_cuda:
        _many_ones(data.device)  # allocated before a CUDA graph is captured
    if data.numel():
        _launch_rows(as_rows(x), None, None, data, scale, None, None, _programs(x, WARPS_PER_SM))
    return data, scale


def _like_gradient(grad: Tensor, factor: Tensor, row_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data, scale = _like_quantized(grad)
    count, width = grad.shape if row_scale is not None else (0, 0)
    columns = data.new_empty(width, round_up_rows(count))
    return data, scale, columns, scale.new_empty(width)


@register_kernel(
    "float8_quantize_gradient(Tensor grad, Tensor factor, Tensor? row_scale) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_like_gradient,
    flops=no_flops,
    scratch=no_scratch,
)
def _quantize_gradient(grad: Tensor, factor: Tensor, row_scale: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    data, scale, columns, column_scale = _like_gradient(grad, factor, row_scale)
    if not data.numel():
        return data, scale, columns, column_scale.fill_(1.0)
    parts = row_factor = None
    programs = _programs(grad, WARPS_PER_SM if row_scale is None else WARPS_WITH_COLUMNS)
    if row_scale is not None:
        parts, row_factor = scale.new_empty(programs, grad.shape[1]), scale.new_empty(len(grad))
    _launch_rows(as_rows(grad), factor, row_scale, data, scale, row_factor, parts, programs)
    if parts is not None:
        width = grad.shape[1]
        inverse = scale.new_empty(width)
        _column_scale_kernel[(cdiv(width, COLUMNS),)](
            parts,
            factor,
            column_scale,
            inverse,
            programs,
            width,
            COLUMNS=COLUMNS,
            PARTS_PER_STEP=PARTS_PER_STEP,
            num_warps=8,
            enable_fp_fusion=True,
        )
        _launch_transpose(data, columns, None, row_factor, inverse)
    return data, scale, columns, column_scale


def _empty_transpose(x: Tensor, scale: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[1], round_up_rows(len(x)), dtype=E4M3)


@register_kernel(
    "float8_transpose(Tensor x, Tensor? scale) -> Tensor", fake=_empty_transpose, flops=no_flops, scratch=no_scratch
)
def _transpose(x: Tensor, scale: Tensor | None) -> Tensor:
    result = _empty_transpose(x, scale)
    if result.numel():
        _launch_transpose(as_rows(x), result, scale, None, None)
    return result


def _launch_transpose(
    x: Tensor, result: Tensor, row_scale: Tensor | None, row_factor: Tensor | None, column_factor: Tensor | None
) -> None:
    """Fill result (width, padded rows) with x (rows, width), divided by row_scale or multiplied by both factors."""
    count, width = x.shape
    _transpose_kernel[(cdiv(result.shape[1], TOKENS) * cdiv(width, CHANNELS),)](
        x,
        result,
        row_scale,
        row_factor,
        column_factor,
        count,
        width,
        x.stride(0),
        result.shape[1],
        TOKENS=TOKENS,
        CHANNELS=CHANNELS,
        num_warps=4,
        enable_fp_fusion=True,
    )


COLUMNS, PARTS_PER_STEP = 32, 256
"""Columns per program for column maxima, and partial results per load."""


def _launch_rows(
    x: Tensor,
    factor: Tensor | None,
    row_scale: Tensor | None,
    data: Tensor,
    scale: Tensor,
    row_factor: Tensor | None,
    parts: Tensor | None,
    programs: int,
) -> None:
    """Fill data and scale, and with row_scale also row_factor and parts (programs, width): x (rows, width)."""
    count, width = x.shape
    _quantize_kernel[(programs,)](
        x,
        factor,
        row_scale,
        data,
        scale,
        row_factor,
        parts,
        count,
        width,
        x.stride(0),
        BLOCK=next_power_of_2(width),
        num_warps=_warps(width),
        enable_fp_fusion=True,
    )


def _programs(x: Tensor, warps_per_sm: int) -> int:
    return min(len(x), max(1, warps_per_sm // _warps(x.shape[1])) * sm_count(x.device))


def _warps(width: int) -> int:
    """Return the warps for 32 elements per thread: 3.4 TB/s on an H200 with 4,096 elements per row."""
    return max(2, min(next_power_of_2(width) // 1024, 32))


UP, BIAS, LEAST = (tl.constexpr(number) for number in (ROUND_UP, SCALE_BIAS, MIN_SCALE_EXPONENT))


@triton.jit
def magnitude(values):
    """Return absolute values in float32, with infinity for NaN, since a maximum ignores NaN."""
    return tl.where(values != values, float("inf"), tl.abs(values))


@triton.jit
def scale_and_inverse(largest):
    """Return `scale_of(largest)` and its inverse, both powers with base two; NaN if the magnitude is infinite."""
    exponent = tl.maximum(((largest.to(tl.int32, bitcast=True) + UP) >> 23) - BIAS, LEAST)
    is_finite = largest < float("inf")
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_finite, scale, float("nan")), tl.where(is_finite, inverse, float("nan"))


# fmt: off
@lean
@triton.jit(do_not_specialize=["count"])
def _quantize_kernel(
    x, factor, row_scale, data, scale, row_factor, parts, count, width, stride, BLOCK: tl.constexpr,
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if factor is not None:
        factors = tl.load(factor + column, mask=inside, other=0.0)
    if parts is not None:
        most = tl.zeros((BLOCK,), tl.float32)
    for row in tl.range(program, count, tl.num_programs(0), num_stages=3):
        values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        if factor is not None:
            values *= factors
        own_scale, inverse = scale_and_inverse(tl.max(magnitude(values), 0))
        rounded = (values * inverse).to(data.dtype.element_ty)
        tl.store(data + row * width + column, rounded, mask=inside)
        tl.store(scale + row, own_scale)
        if parts is not None:
            shift = own_scale * tl.load(row_scale + row)
            tl.store(row_factor + row, shift)
            most = tl.maximum(most, magnitude(rounded.to(tl.float32) * shift))
    if parts is not None:
        tl.store(parts + program * width + column, most, mask=inside)


# fmt: off
@lean
@triton.jit(do_not_specialize=["count"])
def _column_scale_kernel(
    parts, factor, scale, inverse, count, width, COLUMNS: tl.constexpr, PARTS_PER_STEP: tl.constexpr,
):
    # fmt: on
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    most = tl.zeros((PARTS_PER_STEP, COLUMNS), tl.float32)
    for first in range(0, count, PARTS_PER_STEP):
        part = first + tl.arange(0, PARTS_PER_STEP)
        inside = (part < count)[:, None] & (column < width)[None, :]
        at = parts + part.to(tl.int64)[:, None] * width + column[None, :]
        most = tl.maximum(most, tl.load(at, mask=inside, other=0.0))
    own_scale, own_inverse = scale_and_inverse(tl.max(most, 0))
    factors = tl.load(factor + column, mask=column < width, other=1.0)
    tl.store(scale + column, tl.div_rn(own_scale, factors), mask=column < width)
    tl.store(inverse + column, own_inverse, mask=column < width)


# fmt: off
@lean
@triton.jit(do_not_specialize=["count"])
def _transpose_kernel(
    x, result, row_scale, row_factor, column_factor, count, width, stride, padded_count,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):
    # fmt: on
    across = tl.cdiv(padded_count, TOKENS)
    row = (tl.program_id(0) % across) * TOKENS + tl.arange(0, TOKENS)
    column = (tl.program_id(0) // across) * CHANNELS + tl.arange(0, CHANNELS)
    inside = (row < count)[:, None] & (column < width)[None, :]
    values = tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)
    if row_scale is not None:
        inverse = tl.div_rn(1.0, tl.load(row_scale + row, mask=row < count, other=1.0))
        values = values.to(tl.float32) * inverse[:, None]
    if row_factor is not None:
        # Zeros stay zeros only if the row's factor comes first: both factors multiplied may be infinite.
        values = values.to(tl.float32) * tl.load(row_factor + row, mask=row < count, other=0.0)[:, None]
        values *= tl.load(column_factor + column, mask=column < width, other=0.0)[None, :]
    at = result + column.to(tl.int64)[:, None] * padded_count + row[None, :]
    mask = (column < width)[:, None] & (row < padded_count)[None, :]
    tl.store(at, tl.trans(values.to(result.dtype.element_ty)), mask=mask)
