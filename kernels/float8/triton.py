"""
Casts to float8 in Triton, and products for experts; cuBLAS multiplies all other matrices.

A cast by rows keeps whole rows in registers. Transposed copies are made tile by tile from quantized elements. Tensors
in bfloat16 are read once, except weights: they are cast again for the backward pass and not kept. SwiGLU and its
backward pass write no bfloat16.

Products for experts do not synchronize with the device. They read blocks through tensor descriptors, which GPUs from
Hopper on copy by TMA. A program that transposes fills the columns for up to GROUP rows with one expert, so that
products along rows need no masks.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from drawloom.kernels.float8.eager import (
    E4M3,
    GROUP,
    MIN_SCALE,
    MIN_SCALE_EXPONENT,
    ROUND_UP,
    SCALE_BIAS,
    ExpertRows,
    Float8Kernels,
    Float8Rows,
    GroupedFactors,
    NormedRows,
    QuantizedGradient,
    ScaledRows,
    compute_padded_row_count,
    count_padded_columns,
)
from drawloom.kernels.grouped_gemm.triton import locate_tile_rows
from drawloom.kernels.moe.triton import sum_rows_and_gather_scalars
from drawloom.kernels.operation import register_kernel
from drawloom.kernels.results import Routes
from drawloom.kernels.rms_norm.triton import RmsNorm, allocate_norm, launch_forward, norm_rows, rms_norm_triton
from drawloom.kernels.triton import tma
from drawloom.kernels.triton.primitives import (
    cache_launches,
    cdiv,
    check_floats,
    choose_tile_warp_count,
    load_float32,
    load_or_zero,
    mask_tile,
    next_power_of_2,
    sm_count,
    view_as_rows,
)

UP, BIAS, LEAST_EXPONENT = (constexpr(number) for number in (ROUND_UP, SCALE_BIAS, MIN_SCALE_EXPONENT))


INFINITY = constexpr(0x7F800000)
"""Infinity's bits in float32."""


@triton.jit
def get_magnitude_bits(values):
    """Return absolute values' bits in float32, integers in the values' order, with NaN above infinity."""
    return values.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def compute_scale_and_inverse(largest):
    """Return a largest magnitude's scale and its inverse, both powers with base two; NaN if it is not finite."""
    exponent = tl.maximum(((largest + UP) >> 23) - BIAS, LEAST_EXPONENT)
    is_finite = largest < INFINITY
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(is_finite, scale, float("nan")), tl.where(is_finite, inverse, float("nan"))


def allocate_quantized_rows(x: Tensor, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Return empty float8 elements (rows, width) and scales (rows,) on the device of x (any shape)."""
    return x.new_empty(rows, width, dtype=E4M3), x.new_empty(rows, dtype=torch.float32)


def norm_and_quantize_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
) -> NormedRows:
    """Compute `Float8Kernels.norm_and_quantize`: x and residual (..., width), weight (width,)."""
    check_floats("norm_and_quantize_triton", x, weight)
    normed, summed, data, scale = _RmsNormFloat8.apply(x, residual, weight, eps, zero_centered)  # type: ignore[no-untyped-call]
    return NormedRows(normed, x if residual is None else summed, Float8Rows(data, scale, data.new_empty(0)))


class _RmsNormFloat8(RmsNorm):
    """RMSNorm with quantized rows, without a gradient, beside its result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, ...]:
        """Return the norm and the sum, both like x and residual (..., width), and quantized rows and scales."""
        normed, summed, rstd, data, scale = _norm_and_quantize(x, residual, weight, eps, zero_centered)
        RmsNorm.save(ctx, x if residual is None else summed, weight, rstd, zero_centered)
        ctx.mark_non_differentiable(data, scale)
        return normed, summed, data, scale


def _allocate_normed_rows(x: Tensor, residual: Tensor | None) -> tuple[Tensor, ...]:
    return *allocate_norm(x, residual), *allocate_quantized_rows(x, x.shape[:-1].numel(), x.shape[-1])


@register_kernel("rms_norm_float8", _allocate_normed_rows)
def _norm_and_quantize(
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
) -> None:
    launch_forward(_norm_kernel, results, x, residual, weight, eps, zero_centered)


# fmt: off
@cache_launches("count")
def _norm_kernel(
    x, residual, weight, normed, summed, rstd, data, q_scale, count, width, x_stride, residual_stride, eps,
    ZERO_CENTRED: constexpr, ROWS: constexpr, BLOCK: constexpr,
):
    # fmt: on
    result, row, column = norm_rows(
        x, residual, weight, normed, summed, rstd, count, width, x_stride, residual_stride, eps,
        ZERO_CENTRED, ROWS, BLOCK,
    )
    wide = result.to(tl.float32)
    scale, inverse = compute_scale_and_inverse(tl.max(get_magnitude_bits(wide), 1, keep_dims=True))
    inside = (row < count) & (column < width)
    tl.store(data + row * width + column, wide * inverse, mask=inside)
    tl.store(q_scale + row, scale, mask=row < count)


WARPS_PER_SM, WARPS_WITH_COLUMNS = 32, 16
"""
Warps per multiprocessor for a cast by rows, without and with column maxima: more programs would write more partial
results.
"""

STAGES = 2
"""Rows that a program loads at a time for SwiGLU or from several tensors."""

WIDE = 2**14
"""Largest width for two rows at a time in SwiGLU's gradient: they take 160 KiB shared memory."""

MIN_REST = 2**10
"""Smallest second block of a row."""

REGISTERS = 2**16
"""Registers per multiprocessor."""

DEQUANTIZED_ROWS, DEQUANTIZED_COLUMNS = 4, 1024
"""Rows and columns that a program dequantizes."""

TOKENS, CHANNELS = 128, 128
"""Float8Rows and columns in a program's transposed tile."""


ONES = 2**17
"""Length for a vector with ones, the scales for transposed elements."""


def _get_ones(b: Tensor) -> Tensor:
    """Return ones (columns,) for b (columns, inner)."""
    if b.is_cuda and type(b) is Tensor and len(b) <= ONES:
        return _allocate_ones(b.device)[: len(b)]
    return torch.ones(len(b), device=b.device)


@cache
def _allocate_ones(device: torch.device) -> Tensor:
    return torch.ones(ONES, device=device)


@register_kernel("float8_quantize", lambda x: allocate_quantized_rows(x, *x.shape))
def _quantize_rows(rows: tuple[Tensor, Tensor], x: Tensor) -> None:
    _quantize_rows_into(x, None, *rows)


@register_kernel("float8_dequantize", lambda data, dtype: data.new_empty(data.shape, dtype=dtype))
def _dequantize(result: Tensor, data: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
    count, width = data.shape
    if data.numel():
        grid = cdiv(count, DEQUANTIZED_ROWS), cdiv(width, DEQUANTIZED_COLUMNS)
        _dequantize_kernel[grid](data, scale, result, count, width, ROWS=DEQUANTIZED_ROWS, COLUMNS=DEQUANTIZED_COLUMNS)


def _quantize_weights_into(rows: tuple[Tensor, Tensor], weights: list[Tensor]) -> None:
    """Fill data (all outputs, inputs) and scale (all outputs,) with quantized weights."""
    data, scale = rows
    sizes = [*map(len, weights)]
    for weight, part, part_scale in zip(weights, torch.split(data, sizes), torch.split(scale, sizes), strict=True):
        _quantize_rows_into(weight, None, part, part_scale)


_quantize_weights = register_kernel(
    "float8_quantize_weights",
    lambda weights: allocate_quantized_rows(weights[0], sum(map(len, weights)), weights[0].shape[1]),
)(_quantize_weights_into)


@register_kernel(
    "float8_swiglu",
    lambda gate_and_up: allocate_quantized_rows(gate_and_up, len(gate_and_up), gate_and_up.shape[1] // 2),
)
def _quantize_swiglu(rows: tuple[Tensor, Tensor], gate_and_up: Tensor) -> None:
    gate, up = gate_and_up.chunk(2, 1)
    _quantize_rows_into(gate, up, *rows)


def _quantize_rows_into(x: Tensor, up: Tensor | None, data: Tensor, scale: Tensor) -> None:
    """Fill data and scale for x (rows, width), or for silu(x) * up."""
    if data.is_cuda:
        # the scales of transposed elements (`_get_ones`), allocated before a CUDA graph is captured
        _allocate_ones(data.device)
    if data.numel():
        _launch_quantize_rows([view_as_rows(x)], data, scale, _choose_program_count(data, WARPS_PER_SM), up=up)


QuantizedTensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""A gradient's elements and scales by rows, and then by columns, transposed; those are empty if not wanted."""


def _allocate_quantized_gradient(grad: Tensor, factor: Tensor, row_scale: Tensor | None) -> QuantizedTensors:
    data, scale = allocate_quantized_rows(grad, len(grad), len(factor))
    count, width = data.shape if row_scale is not None else (0, 0)
    return data, scale, data.new_empty(width, compute_padded_row_count(count)), scale.new_empty(width)


@register_kernel(
    "float8_quantize_gradient",
    lambda grads, factor, row_scale: _allocate_quantized_gradient(grads[0], factor, row_scale),
)
def _quantize_gradient(
    quantized: QuantizedTensors, grads: list[Tensor], factor: Tensor, row_scale: Tensor | None
) -> None:
    _quantize_gradient_rows_and_columns(quantized, grads, None, factor, row_scale)


@register_kernel("float8_swiglu_gradient", _allocate_quantized_gradient)
def _quantize_swiglu_gradient(
    quantized: QuantizedTensors, grad: Tensor, gate_and_up: Tensor, factor: Tensor, row_scale: Tensor | None
) -> None:
    _quantize_gradient_rows_and_columns(quantized, [grad], gate_and_up, factor, row_scale)


def _quantize_gradient_rows_and_columns(
    quantized: QuantizedTensors,
    grads: list[Tensor],
    gate_and_up: Tensor | None,
    factor: Tensor,
    row_scale: Tensor | None,
) -> None:
    """Quantize the gradients, or with `gate_and_up` SwiGLU's gradient, by rows, and with row_scale by columns."""
    data, scale, columns, column_scale = quantized
    if not data.numel():
        column_scale.fill_(1.0)
        return
    count, width = data.shape
    parts = row_factor = None
    programs = _choose_program_count(
        data if gate_and_up is None else grads[0], WARPS_PER_SM if row_scale is None else WARPS_WITH_COLUMNS
    )
    if row_scale is not None:
        parts, row_factor = scale.new_empty(programs, width), scale.new_empty(count)
    rows = [*map(view_as_rows, grads)]
    if gate_and_up is None:
        _launch_quantize_rows(
            rows, data, scale, programs, factor=factor, row_scale=row_scale, row_factor=row_factor, parts=parts
        )
    else:
        _launch_swiglu_gradient(
            grad=rows[0],
            gate_and_up=view_as_rows(gate_and_up),
            factor=factor,
            row_scale=row_scale,
            data=data,
            scale=scale,
            row_factor=row_factor,
            parts=parts,
            programs=programs,
        )
    if parts is not None:
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
        )
        _scale_and_transpose_into(data, columns, None, row_factor, inverse)


@register_kernel("float8_transpose", lambda x: x.new_empty(x.shape[1], compute_padded_row_count(len(x)), dtype=E4M3))
def _transpose(result: Tensor, x: Tensor) -> None:
    if result.numel():
        _scale_and_transpose_into(x, result, None, None, None)


@register_kernel(
    "float8_transpose_weights",
    lambda weights, scale: weights[0].new_empty(weights[0].shape[1], len(scale), dtype=E4M3),
)
def _quantize_transposed_weights(result: Tensor, weights: list[Tensor], scale: Tensor) -> None:
    sizes = [*map(len, weights)]
    for weight, part, part_scale in zip(weights, torch.split(result, sizes, 1), torch.split(scale, sizes), strict=True):
        if part.numel():
            _scale_and_transpose_into(view_as_rows(weight), part, part_scale, None, None)


def _scale_and_transpose_into(
    x: Tensor, result: Tensor, row_scale: Tensor | None, row_factor: Tensor | None, column_factor: Tensor | None
) -> None:
    """Fill result (width, padded rows) with x (rows, width), divided by row_scale or multiplied by both factors."""
    count, width = x.shape
    _scale_and_transpose_kernel[(cdiv(result.shape[1], TOKENS) * cdiv(width, CHANNELS),)](
        x,
        result,
        row_scale,
        row_factor,
        column_factor,
        count,
        width,
        result.shape[1],
        x.stride(0),
        result.stride(0),
        TOKENS=TOKENS,
        CHANNELS=CHANNELS,
    )


COLUMNS, PARTS_PER_STEP = 32, 256
"""Columns per program for column maxima, and partial results per load."""


def _launch_quantize_rows(
    parts_of_rows: list[Tensor],
    data: Tensor,
    scale: Tensor,
    programs: int,
    *,
    up: Tensor | None = None,
    factor: Tensor | None = None,
    row_scale: Tensor | None = None,
    row_factor: Tensor | None = None,
    parts: Tensor | None = None,
) -> None:
    """
    Fill data and scale, and with row_scale also row_factor and parts (programs, width), for rows in up to three parts
    side by side, or with a single part x for silu(x) * up, with x's strides.
    """
    count, width = data.shape
    x = parts_of_rows[0]
    second, third = (*parts_of_rows[1:], None, None)[:2]
    _quantize_kernel[(programs,)](
        x,
        second,
        third,
        up,
        factor,
        row_scale,
        data,
        scale,
        row_factor,
        parts,
        count,
        width,
        x.shape[1],
        0 if second is None else x.shape[1] + second.shape[1],
        x.stride(0),
        0 if second is None else second.stride(0),
        0 if third is None else third.stride(0),
        **_choose_block_sizes(width),
        STAGES=3 if up is None and second is None else STAGES,
        num_warps=_choose_warp_count(width),
        maxnreg=None if parts is None else _compute_max_registers_per_thread(width),
    )


def _launch_swiglu_gradient(
    grad: Tensor,
    gate_and_up: Tensor,
    factor: Tensor,
    row_scale: Tensor | None,
    data: Tensor,
    scale: Tensor,
    row_factor: Tensor | None,
    parts: Tensor | None,
    programs: int,
) -> None:
    """Fill results like `_launch_quantize_rows`, with SwiGLU's: grad (rows, width), gate_and_up (rows, 2 * width)."""
    count, width = grad.shape
    _swiglu_gradient_kernel[(programs,)](
        grad,
        gate_and_up,
        factor.bfloat16(),  # exact, since factors are powers of two, and half the bytes
        row_scale,
        data,
        scale,
        row_factor,
        parts,
        count,
        width,
        grad.stride(0),
        gate_and_up.stride(0),
        **_choose_block_sizes(width),
        STAGES=STAGES if width <= WIDE else 1,
        num_warps=_choose_warp_count(width),
        maxnreg=None if parts is None else _compute_max_registers_per_thread(width),
    )


def _choose_program_count(x: Tensor, warps_per_sm: int) -> int:
    """Return the program count for casts by row: at most one per row."""
    return min(len(x), max(1, warps_per_sm // _choose_warp_count(x.shape[1])) * sm_count(x.device))


def _choose_block_sizes(width: int) -> dict[str, int]:
    """
    Return sizes for one or two blocks, powers of two, that cover a row: 3 * 2^n is 2^(n + 1) and 2^n, exactly.
    """
    block = next_power_of_2(width)
    rest = next_power_of_2(max(1, width - block // 2))
    return {"BLOCK": block // 2, "REST": rest} if MIN_REST <= rest < block // 2 else {"BLOCK": block, "REST": 0}


def _choose_warp_count(width: int) -> int:
    """Return the warps for 32 elements per thread: 3.4 TB/s on an H200 with 4,096 elements per row."""
    return max(2, min(next_power_of_2(width) // 1024, 32))


def _compute_max_registers_per_thread(width: int) -> int:
    """Return the most registers per thread with which WARPS_WITH_COLUMNS warps fit on a multiprocessor."""
    return REGISTERS // (32 * max(WARPS_WITH_COLUMNS, _choose_warp_count(width)))


@triton.jit
def sigmoid(values):
    """Return sigmoids, exact to some units in the last place: a square costs less than a division."""
    root = tl.rsqrt(1.0 + tl.exp2(values * -1.4426950408889634))
    return root * root


# fmt: off
@triton.jit
def _load_values(x, second, third, up, row, column, width, first_end, second_end, stride, second_stride, third_stride):
    # fmt: on
    """Return a row's values in float32: up to three tensors side by side, or SwiGLU."""
    values = load_float32(x + row * stride + column, column < first_end)
    if second is not None:
        at = second + row * second_stride + column - first_end
        values += load_float32(at, (column >= first_end) & (column < second_end))
    if third is not None:
        at = third + row * third_stride + column - second_end
        values += load_float32(at, (column >= second_end) & (column < width))
    if up is not None:
        ups = load_float32(up + row * stride + column, column < width)
        values *= sigmoid(values) * ups
    return values


@triton.jit
def _quantize_and_store_block(values, inverse, at, inside):
    """Store and return quantized values."""
    quantized = (values * inverse).to(at.dtype.element_ty)
    tl.store(at, quantized, mask=inside)
    return quantized


@triton.jit
def _update_column_maxima(most, quantized, shift):
    """Return column maxima in bfloat16, which takes half the registers: float8 times powers of two are exact."""
    return tl.maximum(most, tl.abs(quantized.to(tl.float32)) * shift).to(tl.bfloat16)


# fmt: off
@cache_launches("count")
def _quantize_kernel(
    x, second, third, up, factor, row_scale, data, scale, row_factor, parts, count, width, first_end, second_end,
    stride, second_stride, third_stride,
    BLOCK: constexpr, REST: constexpr, STAGES: constexpr,
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if factor is not None:
        factors = load_or_zero(factor + column, inside)
    if parts is not None:
        most = tl.zeros((BLOCK,), tl.bfloat16)
        not_finite = tl.zeros((), tl.float32)
    if REST:
        rest = BLOCK + tl.arange(0, REST)
        rest_inside = rest < width
        if factor is not None:
            rest_factors = load_or_zero(factor + rest, rest_inside)
        if parts is not None:
            rest_most = tl.zeros((REST,), tl.bfloat16)
    for row in tl.range(program, count, tl.num_programs(0), num_stages=STAGES):
        values = _load_values(
            x, second, third, up, row, column, width, first_end, second_end, stride, second_stride, third_stride
        )
        if factor is not None:
            values *= factors
        largest = tl.max(get_magnitude_bits(values), 0)
        if REST:
            rest_values = _load_values(
                x, second, third, up, row, rest, width, first_end, second_end, stride, second_stride, third_stride
            )
            if factor is not None:
                rest_values *= rest_factors
            largest = tl.maximum(largest, tl.max(get_magnitude_bits(rest_values), 0))
        own_scale, inverse = compute_scale_and_inverse(largest)
        tl.store(scale + row, own_scale)
        quantized = _quantize_and_store_block(values, inverse, data + row * width + column, inside)
        if REST:
            rest_quantized = _quantize_and_store_block(rest_values, inverse, data + row * width + rest, rest_inside)
        if parts is not None:
            shift = own_scale * tl.load(row_scale + row)
            tl.store(row_factor + row, shift)
            not_finite = tl.where(shift == shift, not_finite, float("inf"))
            most = _update_column_maxima(most, quantized, shift)
            if REST:
                rest_most = _update_column_maxima(rest_most, rest_quantized, shift)
    if parts is not None:
        tl.store(parts + program * width + column, tl.maximum(most.to(tl.float32), not_finite), mask=inside)
        if REST:
            rest_most = tl.maximum(rest_most.to(tl.float32), not_finite)
            tl.store(parts + program * width + rest, rest_most, mask=rest_inside)


@triton.jit
def _load_swiglu_gradient(grad, gate_and_up, factor, column, width):
    """Return a row's gradients for gate and up, times their factors."""
    inside = column < width
    grads = load_float32(grad + column, inside)
    gates = load_float32(gate_and_up + column, inside)
    ups = load_float32(gate_and_up + width + column, inside)
    share = sigmoid(gates)
    silu = gates * share
    # Factors are read again for every row: registers are scarce, and the cache has them.
    gate_factors = load_float32(factor + column, inside)
    up_factors = load_float32(factor + width + column, inside)
    return grads * ups * (share + silu * (1.0 - share)) * gate_factors, grads * silu * up_factors


# fmt: off
@cache_launches("count")
def _swiglu_gradient_kernel(
    grad, gate_and_up, factor, row_scale, data, scale, row_factor, parts, count, width, grad_stride, gate_and_up_stride,
    BLOCK: constexpr, REST: constexpr, STAGES: constexpr,
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if parts is not None:
        gate_most = tl.zeros((BLOCK,), tl.bfloat16)
        up_most = tl.zeros((BLOCK,), tl.bfloat16)
        not_finite = tl.zeros((), tl.float32)
    if REST:
        rest = BLOCK + tl.arange(0, REST)
        rest_inside = rest < width
        if parts is not None:
            rest_gate_most = tl.zeros((REST,), tl.bfloat16)
            rest_up_most = tl.zeros((REST,), tl.bfloat16)
    for row in tl.range(program, count, tl.num_programs(0), num_stages=STAGES):
        grad_row, gate_and_up_row = grad + row * grad_stride, gate_and_up + row * gate_and_up_stride
        gate_grads, up_grads = _load_swiglu_gradient(grad_row, gate_and_up_row, factor, column, width)
        largest = tl.max(tl.maximum(get_magnitude_bits(gate_grads), get_magnitude_bits(up_grads)), 0)
        if REST:
            rest_gate_grads, rest_up_grads = _load_swiglu_gradient(grad_row, gate_and_up_row, factor, rest, width)
            rest_largest = tl.max(tl.maximum(get_magnitude_bits(rest_gate_grads), get_magnitude_bits(rest_up_grads)), 0)
            largest = tl.maximum(largest, rest_largest)
        own_scale, inverse = compute_scale_and_inverse(largest)
        tl.store(scale + row, own_scale)
        at = data + row * (2 * width)
        gate_quantized = _quantize_and_store_block(gate_grads, inverse, at + column, inside)
        up_quantized = _quantize_and_store_block(up_grads, inverse, at + width + column, inside)
        if REST:
            rest_gate_quantized = _quantize_and_store_block(rest_gate_grads, inverse, at + rest, rest_inside)
            rest_up_quantized = _quantize_and_store_block(rest_up_grads, inverse, at + width + rest, rest_inside)
        if parts is not None:
            shift = own_scale * tl.load(row_scale + row)
            tl.store(row_factor + row, shift)
            not_finite = tl.where(shift == shift, not_finite, float("inf"))
            gate_most = _update_column_maxima(gate_most, gate_quantized, shift)
            up_most = _update_column_maxima(up_most, up_quantized, shift)
            if REST:
                rest_gate_most = _update_column_maxima(rest_gate_most, rest_gate_quantized, shift)
                rest_up_most = _update_column_maxima(rest_up_most, rest_up_quantized, shift)
    if parts is not None:
        at = parts + program * (2 * width)
        tl.store(at + column, tl.maximum(gate_most.to(tl.float32), not_finite), mask=inside)
        tl.store(at + width + column, tl.maximum(up_most.to(tl.float32), not_finite), mask=inside)
        if REST:
            tl.store(at + rest, tl.maximum(rest_gate_most.to(tl.float32), not_finite), mask=rest_inside)
            tl.store(at + width + rest, tl.maximum(rest_up_most.to(tl.float32), not_finite), mask=rest_inside)


# fmt: off
@cache_launches("count")
def _column_scale_kernel(
    parts, factor, scale, inverse, count, width, COLUMNS: constexpr, PARTS_PER_STEP: constexpr,
):
    # fmt: on
    """Reduce partial column maxima to scales by column, and their inverses."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    most = tl.zeros((PARTS_PER_STEP, COLUMNS), tl.float32)
    for first in range(0, count, PARTS_PER_STEP):
        part = first + tl.arange(0, PARTS_PER_STEP)
        inside = mask_tile(part < count, column < width)
        at = parts + part.to(tl.int64)[:, None] * width + column[None, :]
        most = tl.maximum(most, load_or_zero(at, inside))
    own_scale, own_inverse = compute_scale_and_inverse(get_magnitude_bits(tl.max(most, 0)))
    factors = tl.load(factor + column, mask=column < width, other=1.0)
    tl.store(scale + column, tl.div_rn(own_scale, factors), mask=column < width)
    tl.store(inverse + column, own_inverse, mask=column < width)


# fmt: off
@cache_launches("count")
def _scale_and_transpose_kernel(
    x, result, row_scale, row_factor, column_factor, count, width, padded_count, stride, result_stride,
    TOKENS: constexpr, CHANNELS: constexpr,
):
    # fmt: on
    """Store a tile of x transposed, in float8, with zeros in padded rows."""
    across = tl.cdiv(padded_count, TOKENS)
    row = (tl.program_id(0) % across) * TOKENS + tl.arange(0, TOKENS)
    column = (tl.program_id(0) // across) * CHANNELS + tl.arange(0, CHANNELS)
    inside = mask_tile(row < count, column < width)
    values = load_or_zero(x + row.to(tl.int64)[:, None] * stride + column[None, :], inside)
    if row_scale is not None:
        inverse = tl.div_rn(1.0, tl.load(row_scale + row, mask=row < count, other=1.0))
        values = values.to(tl.float32) * inverse[:, None]
    if row_factor is not None:
        # Zeros stay zeros only if the row's factor comes first: both factors multiplied may be infinite.
        values = values.to(tl.float32) * load_or_zero(row_factor + row, row < count)[:, None]
        values *= load_or_zero(column_factor + column, column < width)[None, :]
    at = result + column.to(tl.int64)[:, None] * result_stride + row[None, :]
    mask = mask_tile(column < width, row < padded_count)
    tl.store(at, tl.trans(values.to(result.dtype.element_ty)), mask=mask)


# fmt: off
@cache_launches("count")
def _dequantize_kernel(data, scale, result, count, width, ROWS: constexpr, COLUMNS: constexpr):
    # fmt: on
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < count) & (column < width)
    elements = load_float32(data + row * width + column, inside)
    factors = load_or_zero(scale + row, row < count)
    tl.store(result + row * width + column, elements * factors, mask=inside)


CHANNELS = 128
"""Columns per transposed tile."""

TILE = 4096
"""Elements per program for SwiGLU; its gradient takes half as many."""

TAKEN_ROWS, TAKEN_COLUMNS = 16, 1024
"""Rows that a program copies, and columns at a time."""

PARTS, PART_STEP = 16, 8192
"""Programs that search an expert's weight for its largest element, and elements at a time."""

FAST: dict[str, Any] = {"HEIGHT": 128, "SUMMANDS": None, "num_warps": 8, "maxnreg": 128}
SLOW: dict[str, Any] = {"HEIGHT": 64, "SUMMANDS": GROUP}
WIDTH, STEP = 128, GROUP
TILES = {"WIDTH": WIDTH, "STEP": STEP, "STAGES": 3}
"""
Tiles with which two or three programs share a multiprocessor, so that one stores its result while others multiply.

Accumulation in float32 after each GROUP summands needs twice the registers. On an H200, tiles of twice the width took
2 to 13 % longer for weights of 1024 x 768 and 1024 x 384 elements.
"""


def _allocate_expert_rows(
    data: Tensor, scale: Tensor, probabilities: Tensor | None, choices: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    count = len(choices)
    by_row = scale.new_empty(0) if probabilities is None else probabilities.new_empty(count)
    return data.new_empty(count, data.shape[1]), scale.new_empty(count), by_row


@register_kernel("float8_take", _allocate_expert_rows)
def _copy_tokens_to_expert_rows(
    results: tuple[Tensor, Tensor, Tensor],
    data: Tensor,
    scale: Tensor,
    probabilities: Tensor | None,
    choices: Tensor,
    top_k: int,
) -> None:
    rows, row_scale, by_row = results
    count, width = rows.shape
    if rows.numel():
        _copy_tokens_to_experts_kernel[(cdiv(count, TAKEN_ROWS),)](
            data,
            scale,
            None if probabilities is None else probabilities.contiguous(),
            choices,
            rows,
            row_scale,
            by_row,
            count,
            width,
            CHOICES=top_k,
            ROWS=TAKEN_ROWS,
            BLOCK=min(TAKEN_COLUMNS, next_power_of_2(width)),
        )


def _quantize_experts_into(quantized: tuple[Tensor, Tensor], weight: Tensor) -> None:
    """Fill data (experts, outputs, inputs) and scale (experts,) with a quantized weight."""
    data, scale = quantized
    if not data.numel():
        scale.fill_(1.0)
        return
    weight = weight.contiguous()
    size = weight[0].numel()
    parts = weight.new_empty(len(weight), PARTS, dtype=torch.int32)
    _largest_magnitude_kernel[(len(weight) * PARTS,)](
        weight,
        parts,
        size,
        PARTS=PARTS,
        STEP=min(PART_STEP, next_power_of_2(cdiv(size, PARTS))),
        num_warps=8,
    )
    _launch_scale_and_cast_experts(weight, parts, scale, data)


_quantize_experts = register_kernel(
    "float8_quantize_experts",
    lambda weight: (weight.new_empty(weight.shape, dtype=E4M3), weight.new_empty(len(weight), dtype=torch.float32)),
)(_quantize_experts_into)


@register_kernel(
    "float8_transpose_experts",
    lambda weight: weight.new_empty(len(weight), weight.shape[2], weight.shape[1], dtype=E4M3),
)
def _quantize_transposed_experts(result: Tensor, weight: Tensor, scale: Tensor) -> None:
    _launch_scale_and_cast_experts(weight.contiguous(), None, scale, result)


def _launch_scale_and_cast_experts(weight: Tensor, parts: Tensor | None, scale: Tensor, result: Tensor) -> None:
    """Fill scale and result with a weight by its `parts`' largest elements, or a transposed result by its scale."""
    experts, outputs, inputs = weight.shape
    if result.numel():
        _cast_experts_kernel[(experts * cdiv(outputs, GROUP) * cdiv(inputs, CHANNELS),)](
            weight,
            parts,
            scale,
            result,
            outputs,
            inputs,
            PARTS=PARTS,
            ROWS=GROUP,
            CHANNELS=CHANNELS,
            num_warps=8,
        )


@register_kernel(
    "float8_expert_swiglu",
    lambda gate_and_up: allocate_quantized_rows(gate_and_up, len(gate_and_up), gate_and_up.shape[1] // 2),
)
def _quantize_expert_swiglu(quantized: tuple[Tensor, Tensor], gate_and_up: Tensor, probabilities: Tensor) -> None:
    data, scale = quantized
    count, width = data.shape
    if data.numel():
        gate_and_up, block = view_as_rows(gate_and_up), next_power_of_2(width)
        rows = max(1, TILE // block)
        _expert_swiglu_kernel[(cdiv(count, rows),)](
            gate_and_up,
            probabilities,
            data,
            scale,
            count,
            width,
            gate_and_up.stride(0),
            ROWS=rows,
            BLOCK=block,
            num_warps=choose_tile_warp_count(rows * block),
        )


@register_kernel(
    "float8_expert_swiglu_gradient",
    lambda gate_and_up, probabilities: (
        *allocate_quantized_rows(gate_and_up, *gate_and_up.shape),
        probabilities.new_empty(probabilities.shape),
    ),
)
def _quantize_expert_swiglu_gradient(
    results: tuple[Tensor, Tensor, Tensor], grad: Tensor, gate_and_up: Tensor, probabilities: Tensor
) -> None:
    data, scale, grad_probabilities = results
    count, width = grad.shape
    if data.numel():
        grad, gate_and_up, block = view_as_rows(grad), view_as_rows(gate_and_up), next_power_of_2(width)
        rows = max(1, TILE // 2 // block)
        _expert_swiglu_gradient_kernel[(cdiv(count, rows),)](
            grad,
            gate_and_up,
            probabilities,
            data,
            scale,
            grad_probabilities,
            count,
            width,
            grad.stride(0),
            gate_and_up.stride(0),
            ROWS=rows,
            BLOCK=block,
            num_warps=choose_tile_warp_count(rows * block),
        )


def _allocate_factors(left: Tensor, left_scale: Tensor, right: Tensor, ends: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    columns = count_padded_columns(len(left), len(ends))
    left_factor, right_factor = (left.new_empty(x.shape[1], columns) for x in (left, right))
    return left_factor, right_factor, left_scale.new_empty(len(ends))


@register_kernel("float8_factors", _allocate_factors)
def _prepare_outer_product_factors(
    factors: tuple[Tensor, Tensor, Tensor],
    left: Tensor,
    left_scale: Tensor,
    right: Tensor,
    right_scale: Tensor,
    choices: Tensor | None,
    top_k: int,
    ends: Tensor,
) -> None:
    left_factor, right_factor, scale = factors
    if not len(left) or not len(ends):
        left_factor.view(torch.uint8).zero_()
        scale.fill_(MIN_SCALE)
        return
    _largest_scale_product_kernel[(len(ends),)](
        left_scale, right_scale, ends, scale, STEP=1024
    )
    columns = left_factor.shape[1]
    widths = left.shape[1], right.shape[1]
    _combine_scales_and_transpose_kernel[(columns // GROUP * sum(cdiv(width, CHANNELS) for width in widths),)](
        left,
        right,
        choices,
        left_scale,
        right_scale,
        scale,
        ends,
        left_factor,
        right_factor,
        len(ends),
        *widths,
        columns,
        CHOICES=top_k,
        EXPERTS=next_power_of_2(len(ends)),
        ROWS=GROUP,
        CHANNELS=CHANNELS,
    )


@register_kernel(
    "float8_multiply_rows",
    lambda a, b: a.new_empty(len(a), b.shape[1], dtype=torch.bfloat16),
    flops=lambda a, b: 2.0 * a.numel() * b.shape[1],
)
def _multiply_rows(
    result: Tensor, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, fast: bool
) -> None:
    if not result.numel() or not a.numel():
        result.zero_()
        return
    experts, columns, inner = b.shape
    settings = TILES | (FAST if fast else SLOW)
    height = settings["HEIGHT"]
    _multiply_rows_kernel[((len(a) // height + experts) * cdiv(columns, WIDTH),)](
        tma.create_block_descriptor(a, height, STEP),
        tma.create_block_descriptor(b.view(experts * columns, inner), WIDTH, STEP),
        a_scale,
        b_scale,
        ends,
        result,
        experts,
        inner,
        columns,
        EXPERTS=next_power_of_2(experts),
        **settings,
    )


@register_kernel(
    "float8_multiply_groups",
    lambda left, right, ends: left.new_empty(len(ends), len(left), len(right), dtype=torch.bfloat16),
    flops=lambda left, right: 2.0 * left.numel() * len(right),
)
def _sum_outer_products(result: Tensor, left: Tensor, right: Tensor, scale: Tensor, ends: Tensor) -> None:
    if not result.numel() or not left.numel():
        result.zero_()
        return
    experts, height, width = result.shape
    tile_height = SLOW["HEIGHT"]
    down, across = cdiv(height, tile_height), cdiv(width, WIDTH)
    _sum_outer_products_kernel[(experts * down * across,)](
        tma.create_block_descriptor(left, tile_height, STEP),
        tma.create_block_descriptor(right, WIDTH, STEP),
        scale,
        ends,
        result,
        experts,
        down,
        across,
        height,
        width,
        EXPERTS=next_power_of_2(experts),
        **TILES,
        **SLOW,
    )


LEAST = constexpr(MIN_SCALE)


# fmt: off
@cache_launches("count")
def _copy_tokens_to_experts_kernel(
    data, scale, probabilities, choices, rows, row_scale, by_row, count, width,
    CHOICES: constexpr, ROWS: constexpr, BLOCK: constexpr,
):
    # fmt: on
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    choice = tl.load(choices + row, mask=row < count, other=-1)
    is_used = choice >= 0
    token = tl.where(is_used, choice // CHOICES, 0).to(tl.int64)
    tl.store(row_scale + row, tl.load(scale + token, mask=is_used, other=1.0), mask=row < count)
    if probabilities is not None:
        probability = load_or_zero(probabilities + choice, is_used)
        tl.store(by_row + row, probability, mask=row < count)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (column < width)[None, :]
        values = load_or_zero(data + token[:, None] * width + column[None, :], is_used[:, None] & inside)
        at = rows + row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(at, values, mask=(row < count)[:, None] & inside)


@cache_launches()
def _largest_magnitude_kernel(weight, parts, size, PARTS: constexpr, STEP: constexpr):
    """Store a part's largest magnitude as bits; NaN is above infinity."""
    expert, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    length = tl.cdiv(size, PARTS * STEP) * STEP
    most = tl.zeros((STEP,), tl.int32)
    for start in range(part * length, (part + 1) * length, STEP):
        index = start + tl.arange(0, STEP)
        values = load_float32(weight + expert.to(tl.int64) * size + index, index < size)
        most = tl.maximum(most, get_magnitude_bits(values))
    tl.store(parts + tl.program_id(0), tl.max(most, 0))


# fmt: off
@cache_launches()
def _cast_experts_kernel(
    weight, parts, scale, result, outputs, inputs,
    PARTS: constexpr, ROWS: constexpr, CHANNELS: constexpr,
):
    # fmt: on
    down, across = tl.cdiv(outputs, ROWS), tl.cdiv(inputs, CHANNELS)
    expert = (tl.program_id(0) // (down * across)).to(tl.int64)
    tile = tl.program_id(0) % (down * across)
    row = (tile // across) * ROWS + tl.arange(0, ROWS)
    column = (tile % across) * CHANNELS + tl.arange(0, CHANNELS)
    first = expert * outputs * inputs
    mask = mask_tile(row < outputs, column < inputs)
    values = load_float32(weight + first + row[:, None] * inputs + column[None, :], mask)
    if parts is not None:
        own_scale, inverse = compute_scale_and_inverse(tl.max(tl.load(parts + expert * PARTS + tl.arange(0, PARTS)), 0))
        tl.store(scale + expert, own_scale)
        quantized = (values * inverse).to(result.dtype.element_ty)
        tl.store(result + first + row[:, None] * inputs + column[None, :], quantized, mask=mask)
    else:
        quantized = (values * tl.div_rn(1.0, tl.load(scale + expert))).to(result.dtype.element_ty)
        mask = mask_tile(column < inputs, row < outputs)
        tl.store(result + first + column[:, None] * outputs + row[None, :], tl.trans(quantized), mask=mask)


# fmt: off
@cache_launches("count")
def _expert_swiglu_kernel(
    gate_and_up, probabilities, data, scale, count, width, stride, ROWS: constexpr, BLOCK: constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = mask_tile(row < count, column < width)
    at = gate_and_up + row[:, None] * stride + column[None, :]
    gates = load_float32(at, inside)
    ups = load_float32(at + width, inside)
    probability = load_float32(probabilities + row, row < count)
    values = gates * sigmoid(gates) * ups * probability[:, None]
    own_scale, inverse = compute_scale_and_inverse(tl.max(get_magnitude_bits(values), 1))
    quantized = (values * inverse[:, None]).to(data.dtype.element_ty)
    tl.store(data + row[:, None] * width + column[None, :], quantized, mask=inside)
    tl.store(scale + row, own_scale, mask=row < count)


# fmt: off
@cache_launches("count")
def _expert_swiglu_gradient_kernel(
    grad, gate_and_up, probabilities, data, scale, grad_probabilities, count, width, grad_stride, gate_and_up_stride,
    ROWS: constexpr, BLOCK: constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = mask_tile(row < count, column < width)
    grads = load_float32(grad + row[:, None] * grad_stride + column[None, :], inside)
    at = gate_and_up + row[:, None] * gate_and_up_stride + column[None, :]
    gates = load_float32(at, inside)
    ups = load_float32(at + width, inside)
    probability = load_float32(probabilities + row, row < count)
    share = sigmoid(gates)
    silu = gates * share
    total = tl.sum(grads * silu * ups, 1)
    tl.store(grad_probabilities + row, total, mask=row < count)
    grads *= probability[:, None]
    gate_grads = grads * ups * (share + silu * (1.0 - share))
    up_grads = grads * silu
    largest = tl.max(tl.maximum(get_magnitude_bits(gate_grads), get_magnitude_bits(up_grads)), 1)
    own_scale, inverse = compute_scale_and_inverse(largest)
    at = data + row[:, None] * (2 * width) + column[None, :]
    tl.store(at, gate_grads * inverse[:, None], mask=inside)
    tl.store(at + width, up_grads * inverse[:, None], mask=inside)
    tl.store(scale + row, own_scale, mask=row < count)


@cache_launches()
def _largest_scale_product_kernel(left_scale, right_scale, ends, scale, STEP: constexpr):
    """Store the largest product between two scales in an expert's rows; NaN if one is not finite."""
    expert = tl.program_id(0)
    begin = load_or_zero(ends + expert - 1, expert > 0)
    end = tl.load(ends + expert)
    most = tl.zeros((STEP,), tl.int32)
    for start in range(begin, end, STEP):
        row = start + tl.arange(0, STEP)
        left = load_or_zero(left_scale + row, row < end)
        most = tl.maximum(most, get_magnitude_bits(left * load_or_zero(right_scale + row, row < end)))
    largest = tl.max(most, 0)
    number = tl.maximum(largest.to(tl.float32, bitcast=True), LEAST)
    tl.store(scale + expert, tl.where(largest < INFINITY, number, float("nan")))


# fmt: off
@cache_launches("num_experts")
def _combine_scales_and_transpose_kernel(
    left, right, choices, left_scale, right_scale, scale, ends, left_result, right_result, num_experts, left_width,
    right_width, columns, CHOICES: constexpr, EXPERTS: constexpr, ROWS: constexpr, CHANNELS: constexpr,
):
    # fmt: on
    """Store a transposed tile, with rows in their expert's columns, and zeros in padded columns."""
    left_tiles = tl.cdiv(left_width, CHANNELS)
    across = left_tiles + tl.cdiv(right_width, CHANNELS)
    tile, part = tl.program_id(0) // across, tl.program_id(0) % across
    expert, first, end = locate_tile_rows(tile, ends, num_experts, EXPERTS, ROWS)
    if expert >= num_experts:
        return
    row = first + tl.arange(0, ROWS)
    inside = row < end
    column = tile * ROWS + tl.arange(0, ROWS)
    if part < left_tiles:
        channel = part * CHANNELS + tl.arange(0, CHANNELS)
        values = _load_tile(left, row, inside, channel, left_width)
        factor = load_or_zero(left_scale + row, inside)
        factor *= load_or_zero(right_scale + row, inside)
        factor *= tl.div_rn(1.0, tl.load(scale + expert))
        values = (values.to(tl.float32) * factor[:, None]).to(left_result.dtype.element_ty)
        _store_transposed(left_result, values, column, channel, left_width, columns)
    else:
        channel = (part - left_tiles) * CHANNELS + tl.arange(0, CHANNELS)
        source = row
        if choices is not None:
            source = load_or_zero(choices + row, inside) // CHOICES
        values = _load_tile(right, source, inside, channel, right_width)
        _store_transposed(right_result, values, column, channel, right_width, columns)


@triton.jit
def _load_tile(x, row, inside, channel, width):
    at = x + row.to(tl.int64)[:, None] * width + channel[None, :]
    return load_or_zero(at, mask_tile(inside, channel < width))


@triton.jit
def _store_transposed(result, values, column, channel, width, columns):
    at = result + channel.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(at, tl.trans(values), mask=(channel < width)[:, None])


# fmt: off
@cache_launches("num_experts")
def _multiply_rows_kernel(
    a, b, a_scale, b_scale, ends, result, num_experts, inner, columns, EXPERTS: constexpr, HEIGHT: constexpr,
    WIDTH: constexpr, STEP: constexpr, STAGES: constexpr, SUMMANDS: constexpr,
):
    # fmt: on
    across = tl.cdiv(columns, WIDTH)
    expert, first, end = locate_tile_rows(tl.program_id(0) // across, ends, num_experts, EXPERTS, HEIGHT)
    if expert >= num_experts:
        return
    left = (tl.program_id(0) % across) * WIDTH
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for start in tl.range(0, inner, STEP, num_stages=STAGES):
        matrix = b.load([expert * columns + left, start]).T
        total = tl.dot(a.load([first, start]), matrix, total, max_num_imprecise_acc=SUMMANDS)
    row, column = first + tl.arange(0, HEIGHT), left + tl.arange(0, WIDTH)
    factor = load_or_zero(a_scale + row, row < end) * tl.load(b_scale + expert)
    at = result + row.to(tl.int64)[:, None] * columns + column[None, :]
    mask = mask_tile(row < end, column < columns)
    tl.store(at, total * factor[:, None], mask=mask)


# fmt: off
@cache_launches("num_experts")
def _sum_outer_products_kernel(
    left, right, scale, ends, result, num_experts, down, across, height, width, EXPERTS: constexpr,
    HEIGHT: constexpr, WIDTH: constexpr, STEP: constexpr, STAGES: constexpr, SUMMANDS: constexpr,
):
    # fmt: on
    expert = tl.program_id(0) // (down * across)
    tile = tl.program_id(0) % (down * across)
    number = tl.arange(0, EXPERTS)
    end = load_or_zero(ends + number, number < num_experts)
    begin = load_or_zero(ends + number - 1, (number > 0) & (number < num_experts))
    steps = tl.where(number < num_experts, (end - begin + STEP - 1) // STEP, 0)
    first = tl.sum(tl.where(number < expert, steps, 0), 0) * STEP
    past = first + tl.sum(tl.where(number == expert, steps, 0), 0) * STEP
    top, side = (tile // across) * HEIGHT, (tile % across) * WIDTH
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for start in tl.range(first, past, STEP, num_stages=STAGES):
        total = tl.dot(left.load([top, start]), right.load([side, start]).T, total, max_num_imprecise_acc=SUMMANDS)
    total *= tl.load(scale + expert)
    row, column = top + tl.arange(0, HEIGHT), side + tl.arange(0, WIDTH)
    at = result + (expert.to(tl.int64) * height + row[:, None]) * width + column[None, :]
    tl.store(at, total, mask=mask_tile(row < height, column < width))



class TritonFloat8(Float8Kernels):
    """Casts and products in Triton, and products of `torch._scaled_mm`."""

    dequantize_rows = staticmethod(_dequantize)
    transpose = staticmethod(_transpose)  # type: ignore[assignment]
    quantize_weights = staticmethod(_quantize_weights)  # type: ignore[assignment]
    quantize_transposed_weights = staticmethod(_quantize_transposed_weights)  # type: ignore[assignment]
    norm = staticmethod(rms_norm_triton)
    norm_and_quantize = staticmethod(norm_and_quantize_triton)
    quantize_experts = staticmethod(_quantize_experts)  # type: ignore[assignment]
    quantize_transposed_experts = staticmethod(_quantize_transposed_experts)
    quantize_expert_swiglu = staticmethod(_quantize_expert_swiglu)  # type: ignore[assignment]
    quantize_expert_swiglu_gradient = staticmethod(_quantize_expert_swiglu_gradient)  # type: ignore[assignment]
    multiply_rows_by_expert = staticmethod(_multiply_rows)
    sum_outer_products = staticmethod(_sum_outer_products)

    def quantize_rows(self, x: Tensor, transposed: bool) -> Float8Rows:
        data, scale = _quantize_rows(x)
        return Float8Rows(data, scale, _transpose(data) if transposed else data.new_empty(0))

    def quantize_weights_into(self, weights: Sequence[Tensor], rows: Float8Rows) -> None:
        if not weights[0].is_meta:
            _quantize_weights_into((rows.data, rows.scale), [*weights])
            _scale_and_transpose_into(rows.data, rows.transposed, None, None, None)

    def quantize_swiglu(self, gate_and_up: Tensor, transposed: bool) -> Float8Rows:
        data, scale = _quantize_swiglu(gate_and_up)
        return Float8Rows(data, scale, _transpose(data) if transposed else data.new_empty(0))

    def quantize_gradient(self, grads: Sequence[Tensor], factor: Tensor, row_scale: Tensor | None) -> QuantizedGradient:
        return QuantizedGradient(*_quantize_gradient([*grads], factor, row_scale))

    def quantize_swiglu_gradient(
        self, grad: Tensor, gate_and_up: Tensor, factor: Tensor, row_scale: Tensor | None
    ) -> QuantizedGradient:
        return QuantizedGradient(*_quantize_swiglu_gradient(grad, gate_and_up, factor, row_scale))

    def multiply_scaled(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor | None, fast: bool) -> Tensor:
        columns = _get_ones(b) if b_scale is None else b_scale
        if not a.numel():
            return a.new_zeros(len(a), len(b), dtype=torch.bfloat16)
        return torch._scaled_mm(
            a, b.t(), a_scale[:, None], columns[None, :], out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    def copy_tokens_to_expert_rows(self, rows: ScaledRows, probabilities: Tensor | None, routes: Routes) -> ExpertRows:
        top_k = max(routes.dest_row.shape[1], 1)
        return ExpertRows._make(_copy_tokens_to_expert_rows(*rows, probabilities, routes.source_choice, top_k))

    def sum_rows_and_gather_scalars(
        self, rows: Tensor, scalars: Tensor | None, dest_row: Tensor
    ) -> tuple[Tensor, Tensor]:
        return sum_rows_and_gather_scalars(rows, None, scalars, dest_row)

    def quantize_experts_into(self, weight: Tensor, rows: Float8Rows) -> None:
        if not weight.is_meta:
            _quantize_experts_into((rows.data, rows.scale), weight)
            _launch_scale_and_cast_experts(weight, None, rows.scale, rows.transposed)

    def prepare_outer_product_factors(
        self, left: ScaledRows, right: ScaledRows, choices: Tensor | None, top_k: int, ends: Tensor
    ) -> GroupedFactors:
        return GroupedFactors(*_prepare_outer_product_factors(*left, *right, choices, top_k, ends))


TRITON = TritonFloat8()
