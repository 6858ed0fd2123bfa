"""
Routing tables in Triton: a stable counting sort without atomics, and therefore deterministic.

A program in the first kernel counts every expert's choices in one part. The second kernel computes the counts' prefix
sums over parts. The third computes every choice's row: lower experts come first, then earlier parts, then earlier
choices in the part.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.moe import DROPPED, Routes
from drawloom.kernels.operation import register_kernel
from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.primitives import cdiv, next_power_of_2

ENTRIES, STEP = 256, 32
"""Choices in a part, and how many of them a choice is compared with at a time: larger tiles would not fit."""

PARTS, EXPERTS = 1024, 4
"""Tile of counts that a program of the prefix sums loads at a time."""

MAX_CHOICES = 2**31 - 1
"""Most choices, since row indices have 32 bits."""


def moe_routes_triton(expert_indices: Tensor, num_experts: int) -> Routes:
    """Compute moe_routes_eager: expert_indices int32 or int64 (tokens, top_k), -1 for dropped choices."""
    if expert_indices.numel() > MAX_CHOICES:
        raise ValueError(
            f"{expert_indices.numel()} choices are more than 32-bit row indices can number, {MAX_CHOICES}; "
            "use fewer tokens"
        )
    return Routes(*_compute_routes(expert_indices, num_experts))


def _allocate_tables(expert_indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = expert_indices.new_empty(expert_indices.shape, dtype=torch.int32)
    return rows, rows.new_empty(expert_indices.numel()), rows.new_empty(num_experts)


@register_kernel("moe_routes", _allocate_tables)
def _compute_routes(tables: tuple[Tensor, Tensor, Tensor], expert_indices: Tensor, num_experts: int) -> None:
    """Fill the tables of `Routes`: dest_row, source_choice and offsets."""
    rows, choices, offsets = tables
    count = expert_indices.numel()
    if not count or not num_experts:
        rows.fill_(DROPPED)
        choices.fill_(DROPPED)
        offsets.zero_()
        return
    flat, width = expert_indices.contiguous(), next_power_of_2(num_experts)
    parts = cdiv(count, ENTRIES)
    counts, totals = rows.new_empty(parts, width), rows.new_empty(width)
    _count_choices_by_expert_kernel[(parts,)](
        flat, counts, count, ENTRIES=ENTRIES, WIDTH=width, num_warps=4, enable_fp_fusion=True
    )
    experts = min(EXPERTS, width)
    _prefix_sum_kernel[(width // experts,)](
        counts, totals, parts, WIDTH=width, EXPERTS=experts, PARTS=PARTS, num_warps=8, enable_fp_fusion=True
    )
    _assign_rows_kernel[(parts,)](
        flat,
        counts,
        totals,
        offsets,
        rows,
        choices,
        count,
        num_experts,
        ENTRIES=ENTRIES,
        WIDTH=width,
        STEP=STEP,
        num_warps=8,
        enable_fp_fusion=True,
    )


@cache_launches
@triton.jit(do_not_specialize=["count"])
def _count_choices_by_expert_kernel(expert_indices, counts, count, ENTRIES: tl.constexpr, WIDTH: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    entry = part * ENTRIES + tl.arange(0, ENTRIES)
    expert = tl.load(expert_indices + entry, mask=entry < count, other=-1).to(tl.int32)
    tl.store(counts + part * WIDTH + tl.arange(0, WIDTH), tl.histogram(expert, WIDTH, mask=expert >= 0))


@cache_launches
@triton.jit(do_not_specialize=["parts"])
def _prefix_sum_kernel(counts, totals, parts, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, PARTS: tl.constexpr):
    """Replace every count by the sum over all earlier parts (an exclusive prefix sum); store the totals."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, parts, PARTS):
        part = (start + tl.arange(0, PARTS))[:, None]
        at = counts + part.to(tl.int64) * WIDTH + expert[None, :]
        count = tl.load(at, mask=part < parts, other=0)
        tl.store(at, total[None, :] + tl.cumsum(count, 0) - count, mask=part < parts)
        total += tl.sum(count, 0)
    tl.store(totals + expert, total)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["count"])
def _assign_rows_kernel(
    expert_indices, earlier, totals, offsets, rows, choices, count, num_experts,
    ENTRIES: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):
    # fmt: on
    part, index, column = tl.program_id(0).to(tl.int64), tl.arange(0, ENTRIES), tl.arange(0, WIDTH)
    entry = part * ENTRIES + index
    expert = tl.load(expert_indices + entry, mask=entry < count, other=-1).to(tl.int32)
    has_row = expert >= 0
    in_earlier_parts = tl.load(earlier + part * WIDTH + expert, mask=has_row, other=0)
    total = tl.load(totals + column)
    end = tl.cumsum(total, 0)
    of_lower_experts = tl.gather(end - total, tl.where(has_row, expert, 0), 0)
    before = tl.zeros((ENTRIES, STEP), tl.int32)
    for start in tl.static_range(0, ENTRIES, STEP):
        # Loaded again along the other axis: cheaper than a transpose through shared memory.
        other = start + tl.arange(0, STEP)[None, :]
        same = tl.load(expert_indices + part * ENTRIES + other, mask=part * ENTRIES + other < count, other=-1)
        before += ((expert[:, None] == same.to(tl.int32)) & (other < index[:, None])).to(tl.int32)
    row = of_lower_experts + in_earlier_parts + tl.sum(before, 1)
    tl.store(rows + entry, tl.where(has_row, row, -1), mask=entry < count)
    tl.store(choices + row, entry.to(tl.int32), mask=has_row)
    if part == 0:
        tl.store(offsets + column, end, mask=column < num_experts)
    unused = entry >= tl.max(end, 0)
    tl.store(choices + entry, tl.full((ENTRIES,), -1, tl.int32), mask=(entry < count) & unused)
