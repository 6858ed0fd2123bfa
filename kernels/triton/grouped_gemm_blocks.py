"""
Grouped GEMM by TMA (tensor descriptors), for half precision on GPUs with compute capability 9.0.

Rows are sorted by expert, and all rows in a tile belong to one expert.
"""

import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.triton import tma
from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.primitives import cdiv, next_power_of_2

MAX_ROWS = 2**31 - 2**9
"""Most rows, since row indices have 32 bits; the margin of 2^9 is for missing rows of the last tile."""


@triton.jit
def locate_tile_rows(tile, offsets, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return a tile's expert, or `num_experts` for a surplus tile; its first row; and the end of the expert's rows."""
    number = tl.arange(0, EXPERTS)
    end = tl.load(offsets + number, mask=number < num_experts, other=0)
    begin = tl.load(offsets + number - 1, mask=(number > 0) & (number < num_experts), other=0)
    tiles = tl.where(number < num_experts, (end - begin + ROWS - 1) // ROWS, 0)
    last_tile = tl.cumsum(tiles, 0)
    expert = tl.sum((last_tile <= tile).to(tl.int32), 0)
    is_expert = number == expert
    first = tl.sum(tl.where(is_expert, begin + (tile - last_tile + tiles) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(is_expert, end, 0), 0)


MIN_ROWS_PER_EXPERT = 64
"""Minimum average number of rows per expert: with fewer, most of a tile would be empty."""

HEIGHT, WIDTH, STEP = 128, 256, 64
SETTINGS = {"HEIGHT": HEIGHT, "WIDTH": WIDTH, "STEP": STEP, "STAGES": 3, "num_warps": 8, "enable_fp_fusion": True}


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
    _multiply_rows_kernel[(tiles * across,)](
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
    """Fill result (experts, height, width) with a.T @ b by expert: a (rows, height), b (rows, width)."""
    num_experts, height, width = result.shape
    down, across = cdiv(height, HEIGHT), cdiv(width, WIDTH)
    _outer_products_kernel[(num_experts * down * across,)](
        tma.create_block_descriptor(a, STEP, HEIGHT),
        tma.create_block_descriptor(b, STEP, WIDTH),
        a,
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
@cache_launches
@triton.jit(do_not_specialize=["num_experts"])
def _multiply_rows_kernel(
    x, weight, offsets, result, num_experts, inputs, outputs, EXPERTS: tl.constexpr, TRANSPOSED: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
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
    tl.store(at, total.to(result.dtype.element_ty), mask=(row < end)[:, None] & (column < outputs)[None, :])


# fmt: off
@cache_launches
@triton.jit
def _outer_products_kernel(
    a, b, a_pointer, b_pointer, offsets, result, down, across, height, width, a_row, b_row,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    expert = tl.program_id(0) // (down * across)
    tile = tl.program_id(0) % (down * across)
    begin = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
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
        rest_of_a = tl.load(at, mask=(row < end)[None, :] & (of_a < height)[:, None], other=0.0)
        at = b_pointer + row.to(tl.int64)[:, None] * b_row + of_b[None, :]
        rest_of_b = tl.load(at, mask=(row < end)[:, None] & (of_b < width)[None, :], other=0.0)
        total = tl.dot(rest_of_a, rest_of_b, total)
    at = result + (expert.to(tl.int64) * height + of_a[:, None]) * width + of_b[None, :]
    tl.store(at, total.to(result.dtype.element_ty), mask=(of_a < height)[:, None] & (of_b < width)[None, :])
