"""
Grouped GEMM by TMA (tensor descriptors), for half precision on GPUs with compute capability 9.0.

Rows are sorted by expert, and all rows in a tile belong to one expert.

Grouped GEMM in Triton, for any sizes, strides and dtypes, without synchronizing with the device.

The host launches the largest possible number of tiles; a program determines its tile's expert from `offsets`. An
expert's tiles are consecutive, so its matrix stays in the L2 cache.

Expert biases in Triton: one pass over the rows forward, and one per gradient.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from drawloom.kernels.grouped_gemm.eager import (
    ExpertBias,
    GroupedGemm,
    count_outer_product_flops,
    count_row_product_flops,
)
from drawloom.kernels.operation import register_kernel, register_operator
from drawloom.kernels.triton import tma
from drawloom.kernels.triton.primitives import (
    cache_launches,
    cdiv,
    check_floats,
    contiguous_last_dim,
    get_dot_precision,
    load_float32,
    load_or_zero,
    mask_tile,
    next_power_of_2,
)

MAX_ROWS = 2**31 - 2**9
"""Most rows, since row indices have 32 bits; the margin of 2^9 is for missing rows of the last tile."""


@triton.jit
def locate_tile_rows(tile, offsets, num_experts, EXPERTS: constexpr, ROWS: constexpr):
    """Return a tile's expert, or `num_experts` for a surplus tile; its first row; and the end of the expert's rows."""
    number = tl.arange(0, EXPERTS)
    end = load_or_zero(offsets + number, number < num_experts)
    begin = load_or_zero(offsets + number - 1, (number > 0) & (number < num_experts))
    tiles = tl.where(number < num_experts, (end - begin + ROWS - 1) // ROWS, 0)
    last_tile = tl.cumsum(tiles, 0)
    expert = tl.sum((last_tile <= tile).to(tl.int32), 0)
    is_expert = number == expert
    first = tl.sum(tl.where(is_expert, begin + (tile - last_tile + tiles) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(is_expert, end, 0), 0)


MIN_ROWS_PER_EXPERT = 64
"""Minimum average number of rows per expert: with fewer, most of a tile would be empty."""

HEIGHT, WIDTH, STEP = 128, 256, 64
SETTINGS = {"HEIGHT": HEIGHT, "WIDTH": WIDTH, "STEP": STEP, "STAGES": 3, "num_warps": 8}


def is_faster_by_tma(num_experts: int, *factors: Tensor) -> bool:
    """Return whether a product, with the first factor (rows, inputs), can use TMA and gains from it."""
    has_enough_rows = len(factors[0]) >= MIN_ROWS_PER_EXPERT * num_experts
    return (
        has_enough_rows
        and tma.is_supported(factors[0].device)
        and all(_choose_tma_layout(x) is not None for x in factors)
    )


def multiply_rows_by_tma(x: Tensor, weight: Tensor, offsets: Tensor, result: Tensor) -> None:
    """Fill result (rows, outputs) with x (rows, inputs) times weight (experts, inputs, outputs); offsets (experts,)."""
    num_experts, inputs, outputs = weight.shape
    layout = _choose_tma_layout(weight)
    assert layout is not None
    is_transposed = layout is not weight
    tiles, across = len(x) // HEIGHT + num_experts, cdiv(outputs, WIDTH)
    _multiply_rows_by_tma_kernel[(tiles * across,)](
        tma.create_block_descriptor(x, HEIGHT, STEP),
        tma.create_block_descriptor(layout, 1, *((WIDTH, STEP) if is_transposed else (STEP, WIDTH))),
        offsets,
        result,
        num_experts,
        inputs,
        outputs,
        EXPERTS=next_power_of_2(num_experts),
        TRANSPOSED=is_transposed,
        **SETTINGS,
    )


def sum_outer_products_by_tma(a: Tensor, b: Tensor, offsets: Tensor, result: Tensor) -> None:
    """Fill result (experts, height, width) with a.T @ b: a (rows, height), b (rows, width), offsets (experts,)."""
    num_experts, height, width = result.shape
    down, across = cdiv(height, HEIGHT), cdiv(width, WIDTH)
    _outer_products_by_tma_kernel[(num_experts * down * across,)](
        tma.create_block_descriptor(a, STEP, HEIGHT),
        tma.create_block_descriptor(b, STEP, WIDTH),
        a,  # for an expert's last rows
        b,
        offsets,
        result,
        down,
        across,
        height,
        width,
        a.stride(0),
        b.stride(0),
        **SETTINGS,
    )


def _choose_tma_layout(x: Tensor) -> Tensor | None:
    """Return x, or x with its last two dimensions exchanged, as TMA can read it; None if neither is possible."""
    layouts = (x, x.transpose(-1, -2)) if x.ndim == 3 else (x,)
    return next((layout for layout in layouts if tma.can_copy_blocks_of(layout)), None)


# fmt: off
@cache_launches("num_experts")
def _multiply_rows_by_tma_kernel(
    x, weight, offsets, result, num_experts, inputs, outputs, EXPERTS: constexpr, TRANSPOSED: constexpr,
    HEIGHT: constexpr, WIDTH: constexpr, STEP: constexpr, STAGES: constexpr,
):
    # fmt: on
    across = tl.cdiv(outputs, WIDTH)
    expert, first, end = locate_tile_rows(tl.program_id(0) // across, offsets, num_experts, EXPERTS, HEIGHT)
    if expert >= num_experts:
        return
    left = (tl.program_id(0) % across) * WIDTH
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for start in tl.range(0, inputs, STEP, num_stages=STAGES):
        if TRANSPOSED:
            factor = weight.load([expert, left, start]).reshape(WIDTH, STEP).T
        else:
            factor = weight.load([expert, start, left]).reshape(STEP, WIDTH)
        total = tl.dot(x.load([first, start]), factor, total)
    row, column = first + tl.arange(0, HEIGHT), left + tl.arange(0, WIDTH)
    at = result + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(at, total, mask=mask_tile(row < end, column < outputs))


# fmt: off
@cache_launches()
def _outer_products_by_tma_kernel(
    a, b, a_pointer, b_pointer, offsets, result, down, across, height, width, a_row, b_row,
    HEIGHT: constexpr, WIDTH: constexpr, STEP: constexpr, STAGES: constexpr,
):
    # fmt: on
    expert = tl.program_id(0) // (down * across)
    tile = tl.program_id(0) % (down * across)
    begin = load_or_zero(offsets + expert - 1, expert > 0)
    end = tl.load(offsets + expert)
    top, left = (tile // across) * HEIGHT, (tile % across) * WIDTH
    of_a, of_b = top + tl.arange(0, HEIGHT), left + tl.arange(0, WIDTH)
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    whole = begin + (end - begin) // STEP * STEP
    for start in tl.range(begin, whole, STEP, num_stages=STAGES):
        total = tl.dot(a.load([start, top]).T, b.load([start, left]), total)
    # The last block of rows may reach into the next expert, and TMA can't mask: it is loaded through pointers.
    if whole < end:
        row = whole + tl.arange(0, STEP)
        at = a_pointer + row.to(tl.int64)[None, :] * a_row + of_a[:, None]
        rest_of_a = load_or_zero(at, (row < end)[None, :] & (of_a < height)[:, None])
        at = b_pointer + row.to(tl.int64)[:, None] * b_row + of_b[None, :]
        rest_of_b = load_or_zero(at, mask_tile(row < end, of_b < width))
        total = tl.dot(rest_of_a, rest_of_b, total)
    at = result + (expert.to(tl.int64) * height + of_a[:, None]) * width + of_b[None, :]
    tl.store(at, total, mask=mask_tile(of_a < height, of_b < width))


ROWS = (16, 128)
"""Minimum and maximum rows of a tile, which has as many rows as the average expert, within tensor-core limits."""

FIXED_ROWS = 64
"""A tile's rows if a row must have the same bits among however many rows."""

COLUMNS = 128
"""Columns of a tile."""

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
    rows = len(x) + experts * HEIGHT / 2
    return 2.0 * rows * cdiv(outputs, WIDTH) * WIDTH * (inputs + TILE_START)


def _estimate_outer_product_equivalent_flops(a: Tensor, b: Tensor, offsets: Tensor) -> float:
    """Return the FLOPs of a large product that takes as long; an expert's last step of rows is half full."""
    height = cdiv(a.shape[1], HEIGHT) * HEIGHT
    width = cdiv(b.shape[1], WIDTH) * WIDTH
    return 2.0 * height * width * (len(a) + len(offsets) * (STEP / 2 + TILE_START))


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
    elif is_faster_by_tma(len(weight), x, weight):
        multiply_rows_by_tma(x, weight, offsets, result)
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
    if is_faster_by_tma(num_experts, a, b):
        sum_outer_products_by_tma(a, b, offsets, result)
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
    )


def _choose_tile_rows(rows: int, num_experts: int) -> int:
    least, most = ROWS
    return max(least, min(most, next_power_of_2(max(1, rows // num_experts))))


# fmt: off
@cache_launches("num_experts")
def _multiply_rows_kernel(
    x, weight, offsets, result, num_experts, inputs, outputs, x_row, x_channel, weight_expert, weight_row,
    weight_column, EXPERTS: constexpr, ROWS: constexpr, COLUMNS: constexpr, STEP: constexpr,
    PRECISION: constexpr,
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
        a = load_or_zero(at, mask_tile(inside, inner < inputs))
        mask = mask_tile(inner < inputs, column < outputs)
        b = load_or_zero(weight_at + inner.to(tl.int64)[:, None] * weight_row, mask)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    at = result + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(at, total, mask=mask_tile(inside, column < outputs))


# fmt: off
@cache_launches()
def _outer_products_kernel(
    a, b, offsets, result, down, across, height, width, a_row, a_channel, b_row, b_channel,
    HEIGHT: constexpr, WIDTH: constexpr, STEP: constexpr,
    PRECISION: constexpr,
):
    # fmt: on
    expert = tl.program_id(0) // (down * across)
    tile = tl.program_id(0) % (down * across)
    begin = load_or_zero(offsets + expert - 1, expert > 0)
    end = tl.load(offsets + expert)
    of_a = (tile // across) * HEIGHT + tl.arange(0, HEIGHT)
    of_b = (tile % across) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for start in range(begin, end, STEP):
        row = start + tl.arange(0, STEP)
        at = a + row.to(tl.int64)[None, :] * a_row + of_a.to(tl.int64)[:, None] * a_channel
        left = load_or_zero(at, (row < end)[None, :] & (of_a < height)[:, None])
        at = b + row.to(tl.int64)[:, None] * b_row + of_b.to(tl.int64)[None, :] * b_channel
        right = load_or_zero(at, mask_tile(row < end, of_b < width))
        total = tl.dot(left, right, total, input_precision=PRECISION)
    at = result + (expert.to(tl.int64) * height + of_a[:, None]) * width + of_b[None, :]
    tl.store(at, total, mask=mask_tile(of_a < height, of_b < width))


grouped_gemm_triton = GroupedGemm(_multiply_rows_by_expert, _sum_outer_products_by_expert)
"""Grouped product for float32, bfloat16 and float16, and at most MAX_ROWS rows."""

multiply_groups_in_fixed_tiles = GroupedGemm(_multiply_rows_in_fixed_tiles, _sum_outer_products_by_expert)
"""Grouped product like `grouped_gemm_triton`, whose rows have the same bits among any number of rows."""


BIAS_ROWS, BIAS_COLUMNS = 16, 256
"""Rows and columns in a tile."""

PARTS = 8
"""Programs that share an expert's rows; their sums are added in a fixed order."""


@register_kernel("add_expert_bias", lambda rows: rows.new_empty(rows.shape))
def _add_bias_by_expert(result: Tensor, rows: Tensor, bias: Tensor, offsets: Tensor, scale: Tensor | None) -> None:
    check_floats("add_expert_bias_triton", rows, bias)
    count, width = rows.shape
    if result.numel():
        x, bias = contiguous_last_dim(rows), contiguous_last_dim(bias)
        _add_bias_kernel[(cdiv(count, BIAS_ROWS), cdiv(width, BIAS_COLUMNS))](
            *(x, bias, offsets, None if scale is None else scale.contiguous(), result),
            *(count, width, len(offsets), x.stride(0), bias.stride(0)),
            EXPERTS=next_power_of_2(len(offsets)),
            ROWS=BIAS_ROWS,
            COLUMNS=BIAS_COLUMNS,
        )


@register_operator(
    "expert_bias_sums",
    lambda grad, offsets: grad.new_empty(len(offsets), grad.shape[1]),
    scratch=lambda grad, offsets: 4 * PARTS * len(offsets) * grad.shape[1],
)
def _sum_rows_by_expert(grad: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
    experts, width = len(offsets), grad.shape[1]
    if not grad.numel():
        return grad.new_zeros(experts, width)
    sums = grad.new_empty(PARTS, experts, width, dtype=torch.float32)
    grad = contiguous_last_dim(grad)
    _sum_rows_by_expert_kernel[(experts * PARTS, cdiv(width, BIAS_COLUMNS))](
        *(grad, offsets, None if scale is None else scale.contiguous(), sums, experts, width, grad.stride(0)),
        PARTS=PARTS,
        ROWS=BIAS_ROWS,
        COLUMNS=BIAS_COLUMNS,
    )
    return sums.sum(0).to(grad.dtype)


@register_kernel("expert_bias_products", lambda scale: scale.new_empty(scale.shape))
def _sum_bias_products_by_row(result: Tensor, grad: Tensor, bias: Tensor, offsets: Tensor, scale: Tensor) -> None:
    count, width = grad.shape
    if count:
        grad, bias = contiguous_last_dim(grad), contiguous_last_dim(bias)
        _bias_products_kernel[(cdiv(count, BIAS_ROWS),)](
            *(grad, bias, offsets, result, count, width, len(offsets), grad.stride(0), bias.stride(0)),
            EXPERTS=next_power_of_2(len(offsets)),
            ROWS=BIAS_ROWS,
            COLUMNS=BIAS_COLUMNS,
        )


@triton.jit
def _find_row_expert_and_usage(row, offsets, num_experts, EXPERTS: constexpr):
    """Return every row's expert, and whether the row is used; unused rows have the last expert."""
    number = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + number, mask=number < num_experts, other=2147483647)
    expert = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)
    return tl.minimum(expert, num_experts - 1), expert < num_experts


# fmt: off
@cache_launches("count", "num_experts")
def _add_bias_kernel(
    rows, bias, offsets, scale, result, count, width, num_experts, row_stride, bias_stride,
    EXPERTS: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):
    # fmt: on
    """Store rows plus their expert's bias; `scale` (rows,), if any, multiplies the bias."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    expert, is_used = _find_row_expert_and_usage(row, offsets, num_experts, EXPERTS)
    inside = mask_tile(row < count, column < width)
    at = bias + expert.to(tl.int64)[:, None] * bias_stride + column[None, :]
    added = load_float32(at, inside & is_used[:, None])
    if scale is not None:
        factor = load_float32(scale + row, (row < count) & is_used)
        added *= factor[:, None]
    x = load_or_zero(rows + row.to(tl.int64)[:, None] * row_stride + column[None, :], inside)
    total = (x.to(tl.float32) + added).to(result.dtype.element_ty)
    tl.store(result + row.to(tl.int64)[:, None] * width + column[None, :], total, mask=inside)


# fmt: off
@cache_launches("num_experts")
def _sum_rows_by_expert_kernel(
    grad, offsets, scale, sums, num_experts, width, row_stride, PARTS: constexpr, ROWS: constexpr,
    COLUMNS: constexpr,
):
    # fmt: on
    """Store sums over every PARTS-th block in an expert's rows."""
    expert, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = load_or_zero(offsets + expert - 1, expert > 0)
    end = tl.load(offsets + expert)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin + part * ROWS, end, PARTS * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = mask_tile(row < end, column < width)
        at = grad + row.to(tl.int64)[:, None] * row_stride + column[None, :]
        values = load_float32(at, inside)
        if scale is not None:
            values *= load_float32(scale + row, row < end)[:, None]
        total += values
    at = sums + (part * num_experts + expert).to(tl.int64) * width + column
    tl.store(at, tl.sum(total, 0), mask=column < width)


# fmt: off
@cache_launches("count", "num_experts")
def _bias_products_kernel(
    grad, bias, offsets, result, count, width, num_experts, row_stride, bias_stride,
    EXPERTS: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):
    # fmt: on
    """Store every row's gradient times its expert's bias, 0 for unused rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, is_used = _find_row_expert_and_usage(row, offsets, num_experts, EXPERTS)
    is_used = is_used & (row < count)
    total = tl.zeros((ROWS, COLUMNS), tl.float64)  # products of a row cancel each other
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = mask_tile(is_used, column < width)
        values = load_or_zero(grad + row.to(tl.int64)[:, None] * row_stride + column[None, :], inside)
        at = bias + expert.to(tl.int64)[:, None] * bias_stride + column[None, :]
        total += values.to(tl.float64) * load_or_zero(at, inside).to(tl.float64)
    tl.store(result + row, tl.sum(total, 1), mask=row < count)


add_expert_bias_triton = ExpertBias(_add_bias_by_expert, _sum_rows_by_expert, _sum_bias_products_by_row)
"""Addition of biases for float32, bfloat16 and float16."""
