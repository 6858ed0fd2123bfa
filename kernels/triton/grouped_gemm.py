"""
Grouped GEMM in Triton, for any sizes, strides and dtypes, without synchronizing with the device.

The host launches the largest possible number of tiles; a program determines its tile's expert from `offsets`. An
expert's tiles are consecutive, so its matrix stays in the L2 cache. GPUs with TMA use grouped_gemm_blocks.py for
tensors whose layout suits TMA.
"""

import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.grouped_gemm import (
    GroupedGemm,
    count_outer_product_flops,
    count_row_product_flops,
)
from drawloom.kernels.operation import register_kernel
from drawloom.kernels.triton import grouped_gemm_blocks as blocks
from drawloom.kernels.triton.grouped_gemm_blocks import MAX_ROWS, locate_tile_rows
from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.primitives import cdiv, check_floats, get_dot_precision, next_power_of_2

ROWS = (16, 128)
"""Minimum and maximum rows of a tile, which has as many rows as the average expert, within tensor-core limits."""

FIXED_ROWS = 64
"""A tile's rows if a row must have the same bits among however many rows."""

COLUMNS, STEP = 128, 64
"""Columns of a tile, and elements of the inner dimension that one step multiplies."""

WARPS = 8


TILE_START = 290
"""
Inner elements that take as long as a tile's first loads and its stores, which no other work of the program hides.

Fitted to a step with 64 experts of 2,048 rows on one H200: 16.0 ms for 7.4e12 FLOPs. At the rate of large products in a
step, 702 TFLOP/s, it gives 596 for 262,144 x 2048 x 1536 with 128 experts, where the kernel alone reaches 620.
"""


def _estimate_row_product_equivalent_flops(x: Tensor, weight: Tensor) -> float:
    """Return the FLOPs of a large product that takes as long; an expert's last tile of rows is half full."""
    experts, inputs, outputs = weight.shape
    rows = len(x) + experts * blocks.HEIGHT / 2
    return 2.0 * rows * cdiv(outputs, blocks.WIDTH) * blocks.WIDTH * (inputs + TILE_START)


def _estimate_outer_product_equivalent_flops(a: Tensor, b: Tensor, offsets: Tensor) -> float:
    """Return the FLOPs of a large product that takes as long; an expert's last step of rows is half full."""
    height = cdiv(a.shape[1], blocks.HEIGHT) * blocks.HEIGHT
    width = cdiv(b.shape[1], blocks.WIDTH) * blocks.WIDTH
    return 2.0 * height * width * (len(a) + len(offsets) * (blocks.STEP / 2 + TILE_START))


def _check_inputs(x: Tensor, weight: Tensor) -> None:
    """Raise an error for dtypes or a number of rows that the kernels do not accept."""
    check_floats("grouped_gemm_triton", x, weight)
    if len(x) > MAX_ROWS:
        raise ValueError(
            f"{len(x)} rows are more than 32-bit row indices can number, {MAX_ROWS}; use a smaller microbatch"
        )


@register_kernel(
    "grouped_gemm_rows",
    lambda x, weight: x.new_empty(len(x), weight.shape[2]),
    flops=count_row_product_flops,
    equivalent_flops=_estimate_row_product_equivalent_flops,
)
def _multiply_rows_by_expert(result: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    _check_inputs(x, weight)
    if not result.numel() or not weight.numel():
        result.zero_()
    elif blocks.is_faster_by_tma(len(weight), x, weight):
        blocks.multiply_rows_by_tma(x, weight, offsets, result)
    else:
        _multiply_rows_in_tiles(result, x, weight, offsets, _choose_tile_rows(len(x), len(weight)))


@register_kernel(
    "grouped_gemm_fixed_tiles",
    lambda x, weight: x.new_empty(len(x), weight.shape[2]),
    flops=count_row_product_flops,
)
def _multiply_rows_in_fixed_tiles(result: Tensor, x: Tensor, weight: Tensor, offsets: Tensor) -> None:
    _check_inputs(x, weight)
    _multiply_rows_in_tiles(result, x, weight, offsets, FIXED_ROWS)


def _multiply_rows_in_tiles(result: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, rows: int) -> None:
    """Fill result (rows, outputs) by tiles with so many rows."""
    if not result.numel() or not weight.numel():
        result.zero_()
        return
    num_experts, inputs, outputs = weight.shape
    tiles = len(x) // rows + num_experts
    _multiply_rows_kernel[(tiles * cdiv(outputs, COLUMNS),)](
        x,
        weight,
        offsets,
        result,
        num_experts,
        inputs,
        outputs,
        *x.stride(),
        *weight.stride(),
        EXPERTS=next_power_of_2(num_experts),
        ROWS=rows,
        COLUMNS=COLUMNS,
        STEP=STEP,
        PRECISION=get_dot_precision(),
        num_warps=WARPS if rows >= 64 else 4,
        enable_fp_fusion=True,
    )


@register_kernel(
    "grouped_gemm_matrices",
    lambda a, b, offsets: a.new_empty(len(offsets), a.shape[1], b.shape[1]),
    flops=count_outer_product_flops,
    equivalent_flops=_estimate_outer_product_equivalent_flops,
)
def _sum_outer_products_by_expert(result: Tensor, a: Tensor, b: Tensor, offsets: Tensor) -> None:
    if not result.numel() or not len(a):
        result.zero_()
        return
    num_experts, height, width = result.shape
    if blocks.is_faster_by_tma(num_experts, a, b):
        blocks.sum_outer_products_by_tma(a, b, offsets, result)
        return
    down, across = cdiv(height, COLUMNS), cdiv(width, COLUMNS)
    _outer_products_kernel[(num_experts * down * across,)](
        a,
        b,
        offsets,
        result,
        down,
        across,
        height,
        width,
        *a.stride(),
        *b.stride(),
        HEIGHT=COLUMNS,
        WIDTH=COLUMNS,
        STEP=STEP,
        PRECISION=get_dot_precision(),
        num_warps=WARPS,
        enable_fp_fusion=True,
    )


def _choose_tile_rows(rows: int, num_experts: int) -> int:
    least, most = ROWS
    return max(least, min(most, next_power_of_2(max(1, rows // num_experts))))


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["num_experts"])
def _multiply_rows_kernel(
    x, weight, offsets, result, num_experts, inputs, outputs, x_row, x_channel, weight_expert, weight_row,
    weight_column, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # fmt: on
    across = tl.cdiv(outputs, COLUMNS)
    expert, first, end = locate_tile_rows(tl.program_id(0) // across, offsets, num_experts, EXPERTS, ROWS)
    if expert >= num_experts:
        return
    row = first + tl.arange(0, ROWS)
    inside = row < end
    column = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    channel = tl.arange(0, STEP)
    x_at = x + row.to(tl.int64)[:, None] * x_row
    weight_at = weight + expert.to(tl.int64) * weight_expert + column.to(tl.int64)[None, :] * weight_column
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, inputs, STEP):
        inner = start + channel
        at = x_at + inner.to(tl.int64)[None, :] * x_channel
        a = tl.load(at, mask=inside[:, None] & (inner < inputs)[None, :], other=0.0)
        mask = (inner < inputs)[:, None] & (column < outputs)[None, :]
        b = tl.load(weight_at + inner.to(tl.int64)[:, None] * weight_row, mask=mask, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    at = result + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(at, total.to(result.dtype.element_ty), mask=inside[:, None] & (column < outputs)[None, :])


# fmt: off
@cache_launches
@triton.jit
def _outer_products_kernel(
    a, b, offsets, result, down, across, height, width, a_row, a_channel, b_row, b_channel,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # fmt: on
    expert = tl.program_id(0) // (down * across)
    tile = tl.program_id(0) % (down * across)
    begin = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    of_a = (tile // across) * HEIGHT + tl.arange(0, HEIGHT)
    of_b = (tile % across) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for start in range(begin, end, STEP):
        row = start + tl.arange(0, STEP)
        at = a + row.to(tl.int64)[None, :] * a_row + of_a.to(tl.int64)[:, None] * a_channel
        left = tl.load(at, mask=(row < end)[None, :] & (of_a < height)[:, None], other=0.0)
        at = b + row.to(tl.int64)[:, None] * b_row + of_b.to(tl.int64)[None, :] * b_channel
        right = tl.load(at, mask=(row < end)[:, None] & (of_b < width)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
    at = result + (expert.to(tl.int64) * height + of_a[:, None]) * width + of_b[None, :]
    tl.store(at, total.to(result.dtype.element_ty), mask=(of_a < height)[:, None] & (of_b < width)[None, :])


grouped_gemm_triton = GroupedGemm(_multiply_rows_by_expert, _sum_outer_products_by_expert)
"""Grouped product for float32, bfloat16 and float16, and at most MAX_ROWS rows."""

multiply_groups_in_fixed_tiles = GroupedGemm(_multiply_rows_in_fixed_tiles, _sum_outer_products_by_expert)
"""Grouped product like `grouped_gemm_triton`, whose rows have the same bits among any number of rows."""
