"""
Routes in Triton: a counting sort, stable and without atomics, so that it is the same each time.

Each program counts the choices of each expert in its part; sums over parts say where each part's rows of each expert
begin; then each program gives its choices their rows, in their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.moe_routes import NOBODY, Routes
from drawloom.kernels.triton.launching import operation, power_of_two

TILE = 16384
"""Comparisons of choices with experts that a program makes at once."""

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


@operation("moe_routes(Tensor experts_of, int experts) -> (Tensor, Tensor, Tensor)", like=_like)
def _routes(experts_of: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, choices, _ = _like(experts_of, experts)
    count = experts_of.numel()
    choices.fill_(NOBODY)
    if not count or not experts:
        return rows.fill_(NOBODY), choices, rows.new_zeros(experts)
    flat, width = experts_of.contiguous(), power_of_two(experts)
    entries = max(16, TILE // width)
    parts = triton.cdiv(count, entries)
    settings = {"ENTRIES": entries, "WIDTH": width, "num_warps": 8, "enable_fp_fusion": True}
    counts = rows.new_empty(experts, parts)
    _count_kernel[(parts,)](flat, counts, count, experts, parts, **settings)
    past = counts.flatten().cumsum(0, dtype=torch.int32)
    _place_kernel[(parts,)](flat, counts, past, rows, choices, count, experts, parts, **settings)
    return rows, choices, past[parts - 1 :: parts].clone()


@triton.jit
def _choices(experts_of, count, experts, ENTRIES: tl.constexpr, WIDTH: tl.constexpr):
    """The numbers of a part's choices, and whether each is of each expert."""
    entry = tl.program_id(0).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    expert = tl.load(experts_of + entry, mask=entry < count, other=-1).to(tl.int32)
    return entry, expert, (expert[:, None] == tl.arange(0, WIDTH)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=["count", "parts"])
def _count_kernel(experts_of, counts, count, experts, parts, ENTRIES: tl.constexpr, WIDTH: tl.constexpr):
    _, _, of_each = _choices(experts_of, count, experts, ENTRIES, WIDTH)
    expert = tl.arange(0, WIDTH)
    at = counts + expert.to(tl.int64) * parts + tl.program_id(0)
    tl.store(at, tl.sum(of_each, 0), mask=expert < experts)


# fmt: off
@triton.jit(do_not_specialize=["count", "parts"])
def _place_kernel(
    experts_of, counts, past, rows, choices, count, experts, parts, ENTRIES: tl.constexpr, WIDTH: tl.constexpr,
):
    # fmt: on
    entry, expert, of_each = _choices(experts_of, count, experts, ENTRIES, WIDTH)
    each = tl.arange(0, WIDTH)
    at = each.to(tl.int64) * parts + tl.program_id(0)
    first = tl.load(past + at, mask=each < experts, other=0) - tl.load(counts + at, mask=each < experts, other=0)
    row = tl.sum((tl.cumsum(of_each, 0) - 1 + first[None, :]) * of_each, 1)
    known = (entry < count) & (expert >= 0)
    tl.store(rows + entry, tl.where(known, row, -1), mask=entry < count)
    tl.store(choices + row, entry.to(tl.int32), mask=known)
