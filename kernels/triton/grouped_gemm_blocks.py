"""
Grouped GEMM by TMA (tensor descriptors), for half precision on GPUs of compute capability 9.0.

Rows are sorted by expert, and each tile has rows of one expert alone.
"""

import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.triton import tma
from drawloom.kernels.triton.launch import lean
from drawloom.kernels.triton.primitives import cdiv, next_power_of_2

MOST_ROWS = 2**31 - 2**9
"""Row indices have 32 bits; the margin of 2^9 is for those of the last tile that do not exist."""


@triton.jit
def rows_of_tile(tile, offsets, num_experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """A tile's expert, its first row, and the expert's end row; surplus tiles get an expert index of `num_experts`."""
    each = tl.arange(0, EXPERTS)
    end = tl.load(offsets + each, mask=each < num_experts, other=0)
    begin = tl.load(offsets + each - 1, mask=(each > 0) & (each < num_experts), other=0)
    tiles = tl.where(each < num_experts, (end - begin + ROWS - 1) // ROWS, 0)
    past = tl.cumsum(tiles, 0)
    expert = tl.sum((past <= tile).to(tl.int32), 0)
    own = each == expert
    first = tl.sum(tl.where(own, begin + (tile - past + tiles) * ROWS, 0), 0)
    return expert, first, tl.sum(tl.where(own, end, 0), 0)


LEAST_ROWS = 64
"""The least average number of rows per expert: with fewer, most of a tile would be empty."""

HEIGHT, WIDTH, STEP = 128, 256, 64
SETTINGS = {"HEIGHT": HEIGHT, "WIDTH": WIDTH, "STEP": STEP, "STAGES": 3, "num_warps": 8, "enable_fp_fusion": True}


def suit(num_experts: int, *factors: Tensor) -> bool:
    """Whether a product of these, rows (rows, inputs) first, can use TMA and gains from it."""
    enough = len(factors[0]) >= LEAST_ROWS * num_experts
    return enough and tma.is_there(factors[0].device) and all(_stored(x) is not None for x in factors)


def rows_by_blocks(x: Tensor, weight: Tensor, offsets: Tensor, result: Tensor) -> None:
    """Fill result (rows, outputs) with x (rows, inputs) times weight (experts, inputs, outputs); offsets (experts,)."""
    num_experts, inputs, outputs = weight.shape
    stored = _stored(weight)
    assert stored is not None
    turned = stored is not weight
    tiles, across = len(x) // HEIGHT + num_experts, cdiv(outputs, WIDTH)
    _rows_kernel[(tiles * across,)](
        tma.blocks(x, HEIGHT, STEP),
        tma.blocks(stored, 1, *((WIDTH, STEP) if turned else (STEP, WIDTH))),
        offsets,
        result,
        num_experts,
        inputs,
        outputs,
        EXPERTS=next_power_of_2(num_experts),
        TURNED=turned,
        **SETTINGS,
    )


def matrices_by_blocks(a: Tensor, b: Tensor, offsets: Tensor, result: Tensor) -> None:
    """Fill result (experts, height, width) with a.T @ b over each expert's rows: a (rows, height), b (rows, width)."""
    num_experts, height, width = result.shape
    down, across = cdiv(height, HEIGHT), cdiv(width, WIDTH)
    _matrices_kernel[(num_experts * down * across,)](
        tma.blocks(a, STEP, HEIGHT),
        tma.blocks(b, STEP, WIDTH),
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


def _stored(x: Tensor) -> Tensor | None:
    """x as a descriptor takes it: itself, or with its last two dimensions exchanged; None if neither is possible."""
    ways = (x, x.transpose(-1, -2)) if x.ndim == 3 else (x,)
    return next((way for way in ways if tma.fits(way)), None)


# fmt: off
@lean
@triton.jit(do_not_specialize=["num_experts"])
def _rows_kernel(
    x, weight, offsets, result, num_experts, inputs, outputs, EXPERTS: tl.constexpr, TURNED: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
):
    # fmt: on
    across = tl.cdiv(outputs, WIDTH)
    expert, first, end = rows_of_tile(tl.program_id(0) // across, offsets, num_experts, EXPERTS, HEIGHT)
    if expert >= num_experts:
        return
    left = (tl.program_id(0) % across) * WIDTH
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for start in tl.range(0, inputs, STEP, num_stages=STAGES):
        if TURNED:
            factor = weight.load([expert, left, start]).reshape(WIDTH, STEP).T
        else:
            factor = weight.load([expert, start, left]).reshape(STEP, WIDTH)
        total = tl.dot(x.load([first, start]), factor, total)
    row, column = first + tl.arange(0, HEIGHT), left + tl.arange(0, WIDTH)
    at = result + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(at, total.to(result.dtype.element_ty), mask=(row < end)[:, None] & (column < outputs)[None, :])


# fmt: off
@lean
@triton.jit
def _matrices_kernel(
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
