"""
Casts and products in float8 for experts, in Triton, without synchronizing with the device.

Products read blocks through tensor descriptors, which GPUs from Hopper on copy by TMA. A program that transposes fills
the columns for up to GROUP rows with one expert, so that products along rows need no masks.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.float8.casts import E4M3, Float8Rows, ScaledRows
from drawloom.kernels.float8.grouped_casts import (
    GROUP,
    MIN_SCALE,
    ExpertRows,
    GroupedFactors,
    GroupedFloat8Kernels,
    QuantizedSwigluGradient,
    count_padded_columns,
)
from drawloom.kernels.float8.triton_casts import TritonFloat8, sigmoid
from drawloom.kernels.float8.triton_scales import (
    INFINITY,
    allocate_quantized_rows,
    compute_scale_and_inverse,
    get_magnitude_bits,
)
from drawloom.kernels.moe import Routes
from drawloom.kernels.operation import register_kernel
from drawloom.kernels.triton import tma
from drawloom.kernels.triton.grouped_gemm_blocks import locate_tile_rows
from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.moe_permute import sum_rows_and_gather_scalars
from drawloom.kernels.triton.primitives import cdiv, next_power_of_2, view_as_rows

CHANNELS = 128
"""Columns per transposed tile."""

TILE = 4096
"""Elements per program for SwiGLU; its gradient takes half as many."""

TAKEN_ROWS, TAKEN_COLUMNS = 16, 1024
"""Rows that a program copies, and columns at a time."""

PARTS, PART_STEP = 16, 8192
"""Programs that search an expert's weight for its largest element, and elements at a time."""

FAST: dict[str, Any] = {"HEIGHT": 128, "SUMMANDS": None, "num_warps": 8, "maxnreg": 128}
SLOW: dict[str, Any] = {"HEIGHT": 64, "SUMMANDS": GROUP, "num_warps": 4}
WIDTH, STEP = 128, GROUP
TILES = {"WIDTH": WIDTH, "STEP": STEP, "STAGES": 3, "enable_fp_fusion": True}
"""
Tiles with which two or three programs share a multiprocessor, so that one stores its result while others multiply.

Accumulation in float32 after each GROUP summands needs twice the registers. On an H200, tiles of twice the width took
2 to 13 % longer for weights of 1024 x 768 and 1024 x 384 elements.
"""


class TritonGroupedFloat8(TritonFloat8, GroupedFloat8Kernels):
    """Casts and products in Triton."""

    def copy_tokens_to_expert_rows(self, rows: ScaledRows, probabilities: Tensor | None, routes: Routes) -> ExpertRows:
        top_k = max(routes.dest_row.shape[1], 1)
        return ExpertRows._make(_copy_tokens_to_expert_rows(*rows, probabilities, routes.source_choice, top_k))

    def sum_rows_and_gather_scalars(
        self, rows: Tensor, scalars: Tensor | None, dest_row: Tensor
    ) -> tuple[Tensor, Tensor]:
        return sum_rows_and_gather_scalars(rows, None, scalars, dest_row)

    def quantize_experts(self, weight: Tensor) -> ScaledRows:
        return ScaledRows._make(_quantize_experts(weight))

    def quantize_transposed_experts(self, weight: Tensor, scale: Tensor) -> Tensor:
        return _quantize_transposed_experts(weight, scale)

    def quantize_experts_into(self, weight: Tensor, rows: Float8Rows) -> None:
        if not weight.is_meta:
            _quantize_experts_into((rows.data, rows.scale), weight)
            _launch_scale_and_cast_experts(weight, None, rows.scale, rows.transposed)

    def quantize_expert_swiglu(self, gate_and_up: Tensor, probabilities: Tensor) -> ScaledRows:
        return ScaledRows._make(_quantize_swiglu(gate_and_up, probabilities))

    def quantize_expert_swiglu_gradient(
        self, grad: Tensor, gate_and_up: Tensor, probabilities: Tensor
    ) -> QuantizedSwigluGradient:
        return QuantizedSwigluGradient._make(_quantize_swiglu_gradient(grad, gate_and_up, probabilities))

    def prepare_outer_product_factors(
        self, left: ScaledRows, right: ScaledRows, choices: Tensor | None, top_k: int, ends: Tensor
    ) -> GroupedFactors:
        return GroupedFactors(*_prepare_outer_product_factors(*left, *right, choices, top_k, ends))

    def multiply_rows_by_expert(
        self, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, fast: bool
    ) -> Tensor:
        return _multiply_rows(a, a_scale, b, b_scale, ends, fast)

    def sum_outer_products(self, left: Tensor, right: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
        return _sum_outer_products(left, right, scale, ends)


TRITON = TritonGroupedFloat8()


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
            num_warps=4,
            enable_fp_fusion=True,
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
        enable_fp_fusion=True,
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
            enable_fp_fusion=True,
        )


@register_kernel(
    "float8_expert_swiglu",
    lambda gate_and_up: allocate_quantized_rows(gate_and_up, len(gate_and_up), gate_and_up.shape[1] // 2),
)
def _quantize_swiglu(quantized: tuple[Tensor, Tensor], gate_and_up: Tensor, probabilities: Tensor) -> None:
    data, scale = quantized
    count, width = data.shape
    if data.numel():
        gate_and_up, block = view_as_rows(gate_and_up), next_power_of_2(width)
        rows = max(1, TILE // block)
        _swiglu_kernel[(cdiv(count, rows),)](
            gate_and_up,
            probabilities,
            data,
            scale,
            count,
            width,
            gate_and_up.stride(0),
            ROWS=rows,
            BLOCK=block,
            num_warps=_choose_warp_count(rows * block),
            enable_fp_fusion=True,
        )


@register_kernel(
    "float8_expert_swiglu_gradient",
    lambda gate_and_up, probabilities: (
        *allocate_quantized_rows(gate_and_up, *gate_and_up.shape),
        probabilities.new_empty(probabilities.shape),
    ),
)
def _quantize_swiglu_gradient(
    results: tuple[Tensor, Tensor, Tensor], grad: Tensor, gate_and_up: Tensor, probabilities: Tensor
) -> None:
    data, scale, grad_probabilities = results
    count, width = grad.shape
    if data.numel():
        grad, gate_and_up, block = view_as_rows(grad), view_as_rows(gate_and_up), next_power_of_2(width)
        rows = max(1, TILE // 2 // block)
        _swiglu_gradient_kernel[(cdiv(count, rows),)](
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
            num_warps=_choose_warp_count(rows * block),
            enable_fp_fusion=True,
        )


def _choose_warp_count(elements: int) -> int:
    """Return the warps for 16 elements per thread."""
    return max(1, min(elements // 512, 32))


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
        left_scale, right_scale, ends, scale, STEP=1024, num_warps=4, enable_fp_fusion=True
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
        num_warps=4,
        enable_fp_fusion=True,
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


LEAST = tl.constexpr(MIN_SCALE)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["count"])
def _copy_tokens_to_experts_kernel(
    data, scale, probabilities, choices, rows, row_scale, by_row, count, width,
    CHOICES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    choice = tl.load(choices + row, mask=row < count, other=-1)
    is_used = choice >= 0
    token = tl.where(is_used, choice // CHOICES, 0).to(tl.int64)
    tl.store(row_scale + row, tl.load(scale + token, mask=is_used, other=1.0), mask=row < count)
    if probabilities is not None:
        probability = tl.load(probabilities + choice, mask=is_used, other=0.0)
        tl.store(by_row + row, probability, mask=row < count)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (column < width)[None, :]
        values = tl.load(data + token[:, None] * width + column[None, :], mask=is_used[:, None] & inside, other=0.0)
        at = rows + row.to(tl.int64)[:, None] * width + column[None, :]
        tl.store(at, values, mask=(row < count)[:, None] & inside)


@cache_launches
@triton.jit
def _largest_magnitude_kernel(weight, parts, size, PARTS: tl.constexpr, STEP: tl.constexpr):
    """Store a part's largest magnitude as bits; NaN is above infinity."""
    expert, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    length = tl.cdiv(size, PARTS * STEP) * STEP
    most = tl.zeros((STEP,), tl.int32)
    for start in range(part * length, (part + 1) * length, STEP):
        index = start + tl.arange(0, STEP)
        values = tl.load(weight + expert.to(tl.int64) * size + index, mask=index < size, other=0.0).to(tl.float32)
        most = tl.maximum(most, get_magnitude_bits(values))
    tl.store(parts + tl.program_id(0), tl.max(most, 0))


# fmt: off
@cache_launches
@triton.jit
def _cast_experts_kernel(
    weight, parts, scale, result, outputs, inputs,
    PARTS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):
    # fmt: on
    down, across = tl.cdiv(outputs, ROWS), tl.cdiv(inputs, CHANNELS)
    expert = (tl.program_id(0) // (down * across)).to(tl.int64)
    tile = tl.program_id(0) % (down * across)
    row = (tile // across) * ROWS + tl.arange(0, ROWS)
    column = (tile % across) * CHANNELS + tl.arange(0, CHANNELS)
    first = expert * outputs * inputs
    mask = (row < outputs)[:, None] & (column < inputs)[None, :]
    values = tl.load(weight + first + row[:, None] * inputs + column[None, :], mask=mask, other=0.0).to(tl.float32)
    if parts is not None:
        own_scale, inverse = compute_scale_and_inverse(tl.max(tl.load(parts + expert * PARTS + tl.arange(0, PARTS)), 0))
        tl.store(scale + expert, own_scale)
        quantized = (values * inverse).to(result.dtype.element_ty)
        tl.store(result + first + row[:, None] * inputs + column[None, :], quantized, mask=mask)
    else:
        quantized = (values * tl.div_rn(1.0, tl.load(scale + expert))).to(result.dtype.element_ty)
        mask = (column < inputs)[:, None] & (row < outputs)[None, :]
        tl.store(result + first + column[:, None] * outputs + row[None, :], tl.trans(quantized), mask=mask)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["count"])
def _swiglu_kernel(
    gate_and_up, probabilities, data, scale, count, width, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (column < width)[None, :]
    at = gate_and_up + row[:, None] * stride + column[None, :]
    gates = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    probability = tl.load(probabilities + row, mask=row < count, other=0.0).to(tl.float32)
    values = gates * sigmoid(gates) * ups * probability[:, None]
    own_scale, inverse = compute_scale_and_inverse(tl.max(get_magnitude_bits(values), 1))
    quantized = (values * inverse[:, None]).to(data.dtype.element_ty)
    tl.store(data + row[:, None] * width + column[None, :], quantized, mask=inside)
    tl.store(scale + row, own_scale, mask=row < count)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["count"])
def _swiglu_gradient_kernel(
    grad, gate_and_up, probabilities, data, scale, grad_probabilities, count, width, grad_stride, gate_and_up_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < count)[:, None] & (column < width)[None, :]
    grads = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    at = gate_and_up + row[:, None] * gate_and_up_stride + column[None, :]
    gates = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    probability = tl.load(probabilities + row, mask=row < count, other=0.0).to(tl.float32)
    share = sigmoid(gates)
    silu = gates * share
    total = tl.sum(grads * silu * ups, 1)
    tl.store(grad_probabilities + row, total.to(grad_probabilities.dtype.element_ty), mask=row < count)
    grads *= probability[:, None]
    gate_grads = grads * ups * (share + silu * (1.0 - share))
    up_grads = grads * silu
    largest = tl.max(tl.maximum(get_magnitude_bits(gate_grads), get_magnitude_bits(up_grads)), 1)
    own_scale, inverse = compute_scale_and_inverse(largest)
    at = data + row[:, None] * (2 * width) + column[None, :]
    tl.store(at, (gate_grads * inverse[:, None]).to(data.dtype.element_ty), mask=inside)
    tl.store(at + width, (up_grads * inverse[:, None]).to(data.dtype.element_ty), mask=inside)
    tl.store(scale + row, own_scale, mask=row < count)


@cache_launches
@triton.jit
def _largest_scale_product_kernel(left_scale, right_scale, ends, scale, STEP: tl.constexpr):
    """Store the largest product between two scales in an expert's rows; NaN if one is not finite."""
    expert = tl.program_id(0)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    most = tl.zeros((STEP,), tl.int32)
    for start in range(begin, end, STEP):
        row = start + tl.arange(0, STEP)
        left = tl.load(left_scale + row, mask=row < end, other=0.0)
        most = tl.maximum(most, get_magnitude_bits(left * tl.load(right_scale + row, mask=row < end, other=0.0)))
    largest = tl.max(most, 0)
    number = tl.maximum(largest.to(tl.float32, bitcast=True), LEAST)
    tl.store(scale + expert, tl.where(largest < INFINITY, number, float("nan")))


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["num_experts"])
def _combine_scales_and_transpose_kernel(
    left, right, choices, left_scale, right_scale, scale, ends, left_result, right_result, num_experts, left_width,
    right_width, columns, CHOICES: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
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
        factor = tl.load(left_scale + row, mask=inside, other=0.0)
        factor *= tl.load(right_scale + row, mask=inside, other=0.0)
        factor *= tl.div_rn(1.0, tl.load(scale + expert))
        values = (values.to(tl.float32) * factor[:, None]).to(left_result.dtype.element_ty)
        _store_transposed(left_result, values, column, channel, left_width, columns)
    else:
        channel = (part - left_tiles) * CHANNELS + tl.arange(0, CHANNELS)
        source = row
        if choices is not None:
            source = tl.load(choices + row, mask=inside, other=0) // CHOICES
        values = _load_tile(right, source, inside, channel, right_width)
        _store_transposed(right_result, values, column, channel, right_width, columns)


@triton.jit
def _load_tile(x, row, inside, channel, width):
    at = x + row.to(tl.int64)[:, None] * width + channel[None, :]
    return tl.load(at, mask=inside[:, None] & (channel < width)[None, :], other=0.0)


@triton.jit
def _store_transposed(result, values, column, channel, width, columns):
    at = result + channel.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(at, tl.trans(values), mask=(channel < width)[:, None])


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["num_experts"])
def _multiply_rows_kernel(
    a, b, a_scale, b_scale, ends, result, num_experts, inner, columns, EXPERTS: tl.constexpr, HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, SUMMANDS: tl.constexpr,
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
    factor = tl.load(a_scale + row, mask=row < end, other=0.0) * tl.load(b_scale + expert)
    at = result + row.to(tl.int64)[:, None] * columns + column[None, :]
    mask = (row < end)[:, None] & (column < columns)[None, :]
    tl.store(at, (total * factor[:, None]).to(result.dtype.element_ty), mask=mask)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["num_experts"])
def _sum_outer_products_kernel(
    left, right, scale, ends, result, num_experts, down, across, height, width, EXPERTS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, SUMMANDS: tl.constexpr,
):
    # fmt: on
    expert = tl.program_id(0) // (down * across)
    tile = tl.program_id(0) % (down * across)
    number = tl.arange(0, EXPERTS)
    end = tl.load(ends + number, mask=number < num_experts, other=0)
    begin = tl.load(ends + number - 1, mask=(number > 0) & (number < num_experts), other=0)
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
    tl.store(at, total.to(result.dtype.element_ty), mask=(row < height)[:, None] & (column < width)[None, :])
