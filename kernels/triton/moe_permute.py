"""
Permuting tokens to their experts' rows, and summing rows by token, in Triton.

A program processes one token and all its choices, whose rows it reads or writes together; a token is read or written
once. A fixed number of further programs zero the unused rows, counted only on the device.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.moe import Routes
from drawloom.kernels.operation import once_differentiable, register_kernel
from drawloom.kernels.results import PermutedRows
from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.primitives import check_floats, next_power_of_2, view_as_rows

TILE = 4096
"""Elements of all choices that a program processes at a time."""

ELEMENTS_PER_WARP = 512
"""Elements per warp."""

FILLERS = 64
"""Programs that zero unused rows."""


def moe_permute_triton(x: Tensor, probabilities: Tensor, routes: Routes) -> PermutedRows:
    """
    Compute moe_permute_eager for float32, bfloat16 and float16.

    x (tokens, hidden_size), probabilities (tokens, top_k); returns (tokens * top_k, hidden_size) and
    (tokens * top_k,).
    """
    check_floats("moe_permute_triton", x, probabilities)
    return PermutedRows._make(_Permute.apply(x, probabilities, *routes))  # type: ignore[no-untyped-call]


def moe_unpermute_triton(rows: Tensor, routes: Routes, probabilities: Tensor | None = None) -> Tensor:
    """
    Compute moe_unpermute_eager for float32, bfloat16 and float16.

    rows (tokens * top_k, hidden_size), probabilities (tokens, top_k); returns (tokens, hidden_size).
    """
    check_floats("moe_unpermute_triton", rows)
    summed: Tensor = _Unpermute.apply(rows, probabilities, *routes)  # type: ignore[no-untyped-call]
    return summed


class _Permute(Function):
    """Copy to rows, whose backward pass is a sum by token."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, probabilities: Tensor, dest_row: Tensor, choices: Tensor, offsets: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return rows (rows, hidden_size) from x (tokens, hidden_size), and their probabilities (rows,)."""
        ctx.save_for_backward(dest_row)
        rows, row_scalars, _ = _copy_tokens_to_rows(x, None, probabilities, dest_row, offsets, len(choices), False)
        return rows, row_scalars

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_probabilities: Tensor) -> tuple[Tensor | None, ...]:
        (dest_row,) = ctx.saved_tensors
        return *sum_rows_and_gather_scalars(grad, None, grad_probabilities, dest_row), None, None, None


class _Unpermute(Function):
    """Sum by token, whose backward pass copies to rows and computes a dot product per probability gradient."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, probabilities: Tensor | None, dest_row: Tensor, choices: Tensor, offsets: Tensor
    ) -> Tensor:
        """Return (tokens, hidden_size) in the dtype of rows (rows, hidden_size); probabilities are (tokens, top_k)."""
        ctx.needs_probabilities, ctx.count = ctx.needs_input_grad[1], len(choices)
        ctx.save_for_backward(rows if ctx.needs_probabilities else None, probabilities, dest_row, offsets)
        return sum_rows_and_gather_scalars(rows, probabilities, None, dest_row)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, probabilities, dest_row, offsets = ctx.saved_tensors
        weighted = probabilities is not None
        grad_rows, _, products = _copy_tokens_to_rows(grad, rows, probabilities, dest_row, offsets, ctx.count, weighted)
        return grad_rows, products.to(probabilities.dtype) if ctx.needs_probabilities else None, None, None, None


def _allocate_copied_rows(
    x: Tensor,
    others: Tensor | None,
    probabilities: Tensor | None,
    dest_row: Tensor,
    count: int,
    weighted: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `count` rows; their probabilities, empty if `weighted`; and the product with `others` by choice."""
    has_scalars = probabilities is not None and not weighted
    dtype = x.dtype if probabilities is None else probabilities.dtype
    row_scalars = x.new_empty(count if has_scalars else 0, dtype=dtype)
    products = x.new_empty(dest_row.shape if others is not None else 0, dtype=torch.float32)
    return x.new_empty(count, x.shape[1]), row_scalars, products


@register_kernel("moe_spread", _allocate_copied_rows)
def _copy_tokens_to_rows(
    results: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    others: Tensor | None,
    probabilities: Tensor | None,
    dest_row: Tensor,
    offsets: Tensor,
    count: int,
    weighted: bool,
) -> None:
    """Copy tokens to their choices' rows, times probabilities if `weighted`; `others` are rows, too."""
    rows, row_scalars, products = results
    if not dest_row.numel():
        return
    if not len(offsets):
        for result in results:
            result.zero_()
        return
    x, tokens = view_as_rows(x) if x.numel() else x, len(dest_row)
    _copy_tokens_zero_unused_kernel[(tokens + FILLERS,)](
        x,
        None if others is None else view_as_rows(others),
        None if probabilities is None else probabilities.contiguous(),
        dest_row,
        offsets,
        rows,
        row_scalars if len(row_scalars) else None,
        products if products.numel() else None,
        tokens,
        count,
        len(offsets),
        x.shape[1],
        x.stride(0),
        0 if others is None else view_as_rows(others).stride(0),
        WEIGHTED=weighted,
        **choose_tile_constants(dest_row.shape[1], x.shape[1]),
    )


def _allocate_sums(rows: Tensor, row_scalars: Tensor | None, dest_row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums by token, and row scalars by choice."""
    summed = rows.new_empty(len(dest_row), rows.shape[1])
    return summed, rows.new_empty(0) if row_scalars is None else row_scalars.new_empty(dest_row.shape)


@register_kernel("moe_gather", _allocate_sums)
def sum_rows_and_gather_scalars(
    results: tuple[Tensor, Tensor],
    rows: Tensor,
    probabilities: Tensor | None,
    row_scalars: Tensor | None,
    dest_row: Tensor,
) -> None:
    """Sum rows by token, times the choices' probabilities if any; `row_scalars` has a scalar per row."""
    summed, scalars_by_choice = results
    if not dest_row.numel():
        summed.zero_()
        return
    rows = view_as_rows(rows) if rows.numel() else rows
    sum_rows_by_token_into(
        rows, probabilities, row_scalars, dest_row, summed, None if row_scalars is None else scalars_by_choice
    )


def sum_rows_by_token_into(
    rows: Tensor,
    probabilities: Tensor | None,
    row_scalars: Tensor | None,
    dest_row: Tensor,
    summed: Tensor,
    scalars_by_choice: Tensor | None,
) -> None:
    """
    Sum rows (rows, hidden_size) by token into summed (tokens, hidden_size), times probabilities if any.

    The last stride of rows is 1; probabilities are (tokens, top_k). Also writes row_scalars (rows,) by choice to
    scalars_by_choice (tokens, top_k).
    """
    if not dest_row.numel():
        return
    _sum_rows_by_token_kernel[(len(dest_row),)](
        rows,
        None if probabilities is None else probabilities.contiguous(),
        None if row_scalars is None else row_scalars.contiguous(),
        dest_row,
        summed,
        scalars_by_choice,
        rows.shape[1],
        rows.stride(0),
        CHOICES=dest_row.shape[1],
        TOGETHER=next_power_of_2(dest_row.shape[1]),
        enable_fp_fusion=True,
        **choose_row_constants(rows.shape[1]),
    )


def choose_row_constants(width: int, per_warp: int = ELEMENTS_PER_WARP) -> dict[str, Any]:
    """Return how many columns of a row (width,) a program processes at a time, `per_warp` per warp."""
    block = min(max(16, next_power_of_2(width)), TILE)
    return {"BLOCK": block, "num_warps": max(1, min(block // per_warp, 8))}


def choose_tile_constants(top_k: int, width: int) -> dict[str, Any]:
    """Return tile sizes for rows (width,): a token's `top_k` choices, up to a power of 2, by a column block."""
    together = next_power_of_2(top_k)
    block = min(max(16, TILE // together), next_power_of_2(max(width, 1)))
    warps = max(1, min(together * block // ELEMENTS_PER_WARP, 8))
    return {"CHOICES": top_k, "TOGETHER": together, "BLOCK": block, "num_warps": warps, "enable_fp_fusion": True}


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["tokens", "count", "num_experts"])
def _copy_tokens_zero_unused_kernel(
    x, others, probabilities, dest_row, offsets, rows, row_scalars, products, tokens, count, num_experts, width,
    x_stride, others_stride, WEIGHTED: tl.constexpr, CHOICES: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    if token < tokens:
        copy_token_and_dot_others(
            x, others, probabilities, dest_row, rows, row_scalars, products, token, width, x_stride, others_stride,
            WEIGHTED, CHOICES, TOGETHER, BLOCK,
        )  # fmt: skip
    else:
        first = tl.load(offsets + num_experts - 1).to(tl.int64) + token - tokens
        _zero_every_nth_row(rows, row_scalars, first, count.to(tl.int64), tl.num_programs(0) - tokens, width, BLOCK)


# fmt: off
@triton.jit
def copy_token_and_dot_others(
    x, others, probabilities, dest_row, rows, row_scalars, products, token, width, x_stride, others_stride,
    WEIGHTED: tl.constexpr, CHOICES: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    choice, column = tl.arange(0, TOGETHER), tl.arange(0, BLOCK)
    row = tl.load(dest_row + token * CHOICES + choice, mask=choice < CHOICES, other=-1).to(tl.int64)
    has_row = row >= 0
    factor = tl.full((TOGETHER,), 1.0, tl.float32)
    if probabilities is not None:
        probability = tl.load(probabilities + token * CHOICES + choice, mask=choice < CHOICES, other=0.0)
        if row_scalars is not None:
            tl.store(row_scalars + row, probability, mask=has_row)
        factor = probability.to(tl.float32)
    product = tl.zeros((TOGETHER, BLOCK), tl.float32)
    for start in range(0, width, BLOCK):
        within = start + column < width
        inside = has_row[:, None] & within[None, :]
        values = tl.load(x + token * x_stride + start + column, mask=within, other=0.0)
        spread = tl.broadcast_to(values[None, :], (TOGETHER, BLOCK))
        if WEIGHTED:
            spread = (spread.to(tl.float32) * factor[:, None]).to(rows.dtype.element_ty)
        if others is not None:
            at = others + row[:, None] * others_stride + start + column[None, :]
            product += tl.load(at, mask=inside, other=0.0).to(tl.float32) * values.to(tl.float32)[None, :]
        tl.store(rows + row[:, None] * width + start + column[None, :], spread, mask=inside)
    if products is not None:
        # In float64, since terms may cancel: there is one reduction per row, however wide it is.
        tl.store(products + token * CHOICES + choice, tl.sum(product.to(tl.float64), 1), mask=choice < CHOICES)


@triton.jit
def _zero_every_nth_row(rows, row_scalars, first, count, step, width, BLOCK: tl.constexpr):
    """Zero every `step`-th row from `first` on."""
    column = tl.arange(0, BLOCK)
    for row in range(first, count, step):
        if row_scalars is not None:
            tl.store(row_scalars + row, 0.0)
        for start in range(0, width, BLOCK):
            zeros = tl.zeros((BLOCK,), rows.dtype.element_ty)
            at = rows + tl.cast(row, tl.int64) * width + start + column
            tl.store(at, zeros, mask=start + column < width)


# fmt: off
@cache_launches
@triton.jit
def _sum_rows_by_token_kernel(
    rows, probabilities, row_scalars, dest_row, summed, scalars_by_choice, width, rows_stride,
    CHOICES: tl.constexpr, TOGETHER: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    choice, column = tl.arange(0, TOGETHER), tl.arange(0, BLOCK)
    within = choice < CHOICES
    row = tl.load(dest_row + token * CHOICES + choice, mask=within, other=-1).to(tl.int64)
    if row_scalars is not None:
        scalar = tl.load(row_scalars + row, mask=row >= 0, other=0.0)
        tl.store(scalars_by_choice + token * CHOICES + choice, scalar, mask=within)
    for start in range(0, width, BLOCK):
        total = tl.zeros((BLOCK,), tl.float32)
        # One choice at a time: a sum over a tile of rows moves a third of the bytes per second.
        for number in tl.static_range(CHOICES):
            source = tl.load(dest_row + token * CHOICES + number).to(tl.int64)
            end = tl.where(source >= 0, width, 0)
            values = tl.load(rows + source * rows_stride + start + column, mask=start + column < end, other=0.0)
            values = values.to(tl.float32)
            if probabilities is not None:
                values *= tl.load(probabilities + token * CHOICES + number).to(tl.float32)
            total += values
        total = total.to(summed.dtype.element_ty)
        tl.store(summed + token * width + start + column, total, mask=start + column < width)
