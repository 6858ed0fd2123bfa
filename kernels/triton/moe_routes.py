"""
Routes in Triton: a counting sort, stable and without atomics, so that it is the same each time.

A program counts the choices of each expert in its small part. A few programs add up over parts, some experts each. Then
each part's choices get their rows: behind those of lower experts, of earlier parts, and of earlier choices in the part.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.moe import NOBODY, Routes
from drawloom.kernels.operation import register_kernel
from drawloom.kernels.triton.primitives import next_power_of_2

ENTRIES, STEP = 256, 32
"""Choices of a part, and with how many of these they are compared at once: more would not fit."""

PARTS, EXPERTS = 1024, 4
"""Of which a program adds up counts at once."""

LARGEST = 2**31 - 1
"""Rows are numbered in 32 bits."""


def moe_routes_triton(experts_of: Tensor, experts: int) -> Routes:
    """What moe_routes_eager gives."""
    if experts_of.numel() > LARGEST:
        raise ValueError(f"{experts_of.numel()} choices are more than rows have numbers, {LARGEST}")
    return Routes(*_routes(experts_of, experts))


def _like(experts_of: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = experts_of.new_empty(experts_of.shape, dtype=torch.int32)
    return rows, rows.new_empty(experts_of.numel()), rows.new_empty(experts)


@register_kernel("moe_routes(Tensor experts_of, int experts) -> (Tensor, Tensor, Tensor)", fake=_like)
def _routes(experts_of: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, choices, ends = _like(experts_of, experts)
    count = experts_of.numel()
    if not count or not experts:
        return rows.fill_(NOBODY), choices.fill_(NOBODY), ends.zero_()
    flat, width = experts_of.contiguous(), next_power_of_2(experts)
    parts = triton.cdiv(count, ENTRIES)
    counts, totals = rows.new_empty(parts, width), rows.new_empty(width)
    _count_kernel[(parts,)](flat, counts, count, ENTRIES=ENTRIES, WIDTH=width, num_warps=4, enable_fp_fusion=True)
    together = min(EXPERTS, width)
    _add_up_kernel[(width // together,)](
        counts, totals, parts, WIDTH=width, EXPERTS=together, PARTS=PARTS, num_warps=8, enable_fp_fusion=True
    )
    _place_kernel[(parts,)](
        flat,
        counts,
        totals,
        ends,
        rows,
        choices,
        count,
        experts,
        ENTRIES=ENTRIES,
        WIDTH=width,
        STEP=STEP,
        num_warps=8,
        enable_fp_fusion=True,
    )
    return rows, choices, ends


@triton.jit(do_not_specialize=["count"])
def _count_kernel(experts_of, counts, count, ENTRIES: tl.constexpr, WIDTH: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    entry = part * ENTRIES + tl.arange(0, ENTRIES)
    expert = tl.load(experts_of + entry, mask=entry < count, other=-1).to(tl.int32)
    tl.store(counts + part * WIDTH + tl.arange(0, WIDTH), tl.histogram(expert, WIDTH, mask=expert >= 0))


@triton.jit(do_not_specialize=["parts"])
def _add_up_kernel(counts, totals, parts, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, PARTS: tl.constexpr):
    """Each count becomes that of all earlier parts."""
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), tl.int32)
    for start in range(0, parts, PARTS):
        part = (start + tl.arange(0, PARTS))[:, None]
        at = counts + part.to(tl.int64) * WIDTH + expert[None, :]
        own = tl.load(at, mask=part < parts, other=0)
        tl.store(at, total[None, :] + tl.cumsum(own, 0) - own, mask=part < parts)
        total += tl.sum(own, 0)
    tl.store(totals + expert, total)


# fmt: off
@triton.jit(do_not_specialize=["count"])
def _place_kernel(
    experts_of, earlier, totals, ends, rows, choices, count, experts,
    ENTRIES: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):
    # fmt: on
    part, place, each = tl.program_id(0).to(tl.int64), tl.arange(0, ENTRIES), tl.arange(0, WIDTH)
    entry = part * ENTRIES + place
    expert = tl.load(experts_of + entry, mask=entry < count, other=-1).to(tl.int32)
    known = expert >= 0
    in_earlier_parts = tl.load(earlier + part * WIDTH + expert, mask=known, other=0)
    total = tl.load(totals + each)
    past = tl.cumsum(total, 0)
    of_lower_experts = tl.gather(past - total, tl.where(known, expert, 0), 0)
    before = tl.zeros((ENTRIES, STEP), tl.int32)
    for start in tl.static_range(0, ENTRIES, STEP):
        # The same numbers again, along the other axis: cheaper than to move them there.
        other = start + tl.arange(0, STEP)[None, :]
        same = tl.load(experts_of + part * ENTRIES + other, mask=part * ENTRIES + other < count, other=-1)
        before += ((expert[:, None] == same.to(tl.int32)) & (other < place[:, None])).to(tl.int32)
    row = of_lower_experts + in_earlier_parts + tl.sum(before, 1)
    tl.store(rows + entry, tl.where(known, row, -1), mask=entry < count)
    tl.store(choices + row, entry.to(tl.int32), mask=known)
    if part == 0:
        tl.store(ends + each, past, mask=each < experts)
    unused = entry >= tl.max(past, 0)
    tl.store(choices + entry, tl.full((ENTRIES,), -1, tl.int32), mask=(entry < count) & unused)
