"""
Casts to float8 in Triton; cuBLAS multiplies.

A cast by rows keeps whole rows in registers. Transposed copies are made tile by tile from quantized elements. Tensors
in bfloat16 are read once, except weights: they are cast again for the backward pass and not kept. SwiGLU and its
backward pass write no bfloat16.
"""

from collections.abc import Sequence
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.float8.casts import (
    E4M3,
    Float8Kernels,
    Float8Rows,
    NormedRows,
    QuantizedGradient,
    ScaledRows,
    compute_padded_row_count,
)
from drawloom.kernels.float8.triton_rms_norm import norm_and_quantize_triton
from drawloom.kernels.float8.triton_scales import (
    allocate_quantized_rows,
    compute_scale_and_inverse,
    get_magnitude_bits,
)
from drawloom.kernels.operation import register_kernel
from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.primitives import cdiv, next_power_of_2, sm_count, view_as_rows
from drawloom.kernels.triton.rms_norm import rms_norm_triton

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


class TritonFloat8(Float8Kernels):
    """Casts in Triton, and products by `torch._scaled_mm`."""

    def quantize_rows(self, x: Tensor, transposed: bool) -> Float8Rows:
        data, scale = _quantize_rows(x)
        return Float8Rows(data, scale, _transpose(data) if transposed else data.new_empty(0))

    def dequantize_rows(self, data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return _dequantize(data, scale, dtype)

    def transpose(self, data: Tensor) -> Tensor:
        return _transpose(data)

    def quantize_weights(self, weights: Sequence[Tensor]) -> ScaledRows:
        return ScaledRows._make(_quantize_weights([*weights]))

    def quantize_transposed_weights(self, weights: Sequence[Tensor], scale: Tensor) -> Tensor:
        return _quantize_transposed_weights([*weights], scale)

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

    def norm(self, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        return rms_norm_triton(x, weight, eps, zero_centered)

    def norm_and_quantize(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
    ) -> NormedRows:
        return norm_and_quantize_triton(x, residual, weight, eps, zero_centered)

    def multiply_scaled(self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor | None, fast: bool) -> Tensor:
        columns = _get_ones(b) if b_scale is None else b_scale
        if not a.numel():
            return a.new_zeros(len(a), len(b), dtype=torch.bfloat16)
        return torch._scaled_mm(
            a, b.t(), a_scale[:, None], columns[None, :], out_dtype=torch.bfloat16, use_fast_accum=fast
        )


TRITON = TritonFloat8()

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
        _allocate_ones(data.device)  # allocated before a CUDA graph is captured
    if data.numel():
        rows = view_as_rows(x)
        _launch_quantize_rows(
            [rows], up, None, None, data, scale, None, None, _choose_program_count(data, WARPS_PER_SM)
        )


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
    results = data, scale, row_factor, parts
    if gate_and_up is None:
        _launch_quantize_rows([*map(view_as_rows, grads)], None, factor, row_scale, *results, programs)
    else:
        _launch_swiglu_gradient(
            view_as_rows(grads[0]), view_as_rows(gate_and_up), factor, row_scale, *results, programs
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
            enable_fp_fusion=True,
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
        num_warps=4,
        enable_fp_fusion=True,
    )


COLUMNS, PARTS_PER_STEP = 32, 256
"""Columns per program for column maxima, and partial results per load."""


def _launch_quantize_rows(
    parts_of_rows: list[Tensor],
    up: Tensor | None,
    factor: Tensor | None,
    row_scale: Tensor | None,
    data: Tensor,
    scale: Tensor,
    row_factor: Tensor | None,
    parts: Tensor | None,
    programs: int,
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
        enable_fp_fusion=True,
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
        enable_fp_fusion=True,
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
    values = tl.load(x + row * stride + column, mask=column < first_end, other=0.0).to(tl.float32)
    if second is not None:
        at = second + row * second_stride + column - first_end
        values += tl.load(at, mask=(column >= first_end) & (column < second_end), other=0.0).to(tl.float32)
    if third is not None:
        at = third + row * third_stride + column - second_end
        values += tl.load(at, mask=(column >= second_end) & (column < width), other=0.0).to(tl.float32)
    if up is not None:
        ups = tl.load(up + row * stride + column, mask=column < width, other=0.0).to(tl.float32)
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
@cache_launches
@triton.jit(do_not_specialize=["count"])
def _quantize_kernel(
    x, second, third, up, factor, row_scale, data, scale, row_factor, parts, count, width, first_end, second_end,
    stride, second_stride, third_stride,
    BLOCK: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    if factor is not None:
        factors = tl.load(factor + column, mask=inside, other=0.0)
    if parts is not None:
        most = tl.zeros((BLOCK,), tl.bfloat16)
        not_finite = tl.zeros((), tl.float32)
    if REST:
        rest = BLOCK + tl.arange(0, REST)
        rest_inside = rest < width
        if factor is not None:
            rest_factors = tl.load(factor + rest, mask=rest_inside, other=0.0)
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
    grads = tl.load(grad + column, mask=inside, other=0.0).to(tl.float32)
    gates = tl.load(gate_and_up + column, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(gate_and_up + width + column, mask=inside, other=0.0).to(tl.float32)
    share = sigmoid(gates)
    silu = gates * share
    # Factors are read again for every row: registers are scarce, and the cache has them.
    gate_factors = tl.load(factor + column, mask=inside, other=0.0).to(tl.float32)
    up_factors = tl.load(factor + width + column, mask=inside, other=0.0).to(tl.float32)
    return grads * ups * (share + silu * (1.0 - share)) * gate_factors, grads * silu * up_factors


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["count"])
def _swiglu_gradient_kernel(
    grad, gate_and_up, factor, row_scale, data, scale, row_factor, parts, count, width, grad_stride, gate_and_up_stride,
    BLOCK: tl.constexpr, REST: tl.constexpr, STAGES: tl.constexpr,
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
@cache_launches
@triton.jit(do_not_specialize=["count"])
def _column_scale_kernel(
    parts, factor, scale, inverse, count, width, COLUMNS: tl.constexpr, PARTS_PER_STEP: tl.constexpr,
):
    # fmt: on
    """Reduce partial column maxima to scales by column, and their inverses."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    most = tl.zeros((PARTS_PER_STEP, COLUMNS), tl.float32)
    for first in range(0, count, PARTS_PER_STEP):
        part = first + tl.arange(0, PARTS_PER_STEP)
        inside = (part < count)[:, None] & (column < width)[None, :]
        at = parts + part.to(tl.int64)[:, None] * width + column[None, :]
        most = tl.maximum(most, tl.load(at, mask=inside, other=0.0))
    own_scale, own_inverse = compute_scale_and_inverse(get_magnitude_bits(tl.max(most, 0)))
    factors = tl.load(factor + column, mask=column < width, other=1.0)
    tl.store(scale + column, tl.div_rn(own_scale, factors), mask=column < width)
    tl.store(inverse + column, own_inverse, mask=column < width)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["count"])
def _scale_and_transpose_kernel(
    x, result, row_scale, row_factor, column_factor, count, width, padded_count, stride, result_stride,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):
    # fmt: on
    """Store a tile of x transposed, in float8, with zeros in padded rows."""
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
    at = result + column.to(tl.int64)[:, None] * result_stride + row[None, :]
    mask = (column < width)[:, None] & (row < padded_count)[None, :]
    tl.store(at, tl.trans(values.to(result.dtype.element_ty)), mask=mask)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["count"])
def _dequantize_kernel(data, scale, result, count, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    # fmt: on
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < count) & (column < width)
    elements = tl.load(data + row * width + column, mask=inside, other=0.0).to(tl.float32)
    factors = tl.load(scale + row, mask=row < count, other=0.0)
    tl.store(result + row * width + column, (elements * factors).to(result.dtype.element_ty), mask=inside)
