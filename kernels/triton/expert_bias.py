"""Expert biases in Triton: one pass over the rows forward, and one per gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.expert_bias import ExpertBias
from drawloom.kernels.operation import register_kernel, register_operator
from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.primitives import cdiv, check_floats, contiguous_last_dim, next_power_of_2

ROWS, COLUMNS = 16, 256
"""Rows and columns in a tile."""

PARTS = 8
"""Programs that share an expert's rows; their sums are added in a fixed order."""


@register_kernel("add_expert_bias", lambda rows: rows.new_empty(rows.shape))
def _add_bias_by_expert(result: Tensor, rows: Tensor, bias: Tensor, offsets: Tensor, scale: Tensor | None) -> None:
    check_floats("add_expert_bias_triton", rows, bias)
    count, width = rows.shape
    if result.numel():
        x, bias = contiguous_last_dim(rows), contiguous_last_dim(bias)
        _add_bias_kernel[(cdiv(count, ROWS), cdiv(width, COLUMNS))](
            *(x, bias, offsets, None if scale is None else scale.contiguous(), result),
            *(count, width, len(offsets), x.stride(0), bias.stride(0)),
            EXPERTS=next_power_of_2(len(offsets)),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=4,
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
    _sum_rows_by_expert_kernel[(experts * PARTS, cdiv(width, COLUMNS))](
        *(grad, offsets, None if scale is None else scale.contiguous(), sums, experts, width, grad.stride(0)),
        PARTS=PARTS,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=4,
    )
    return sums.sum(0).to(grad.dtype)


@register_kernel("expert_bias_products", lambda scale: scale.new_empty(scale.shape))
def _sum_bias_products_by_row(result: Tensor, grad: Tensor, bias: Tensor, offsets: Tensor, scale: Tensor) -> None:
    count, width = grad.shape
    if count:
        grad, bias = contiguous_last_dim(grad), contiguous_last_dim(bias)
        _bias_products_kernel[(cdiv(count, ROWS),)](
            *(grad, bias, offsets, result, count, width, len(offsets), grad.stride(0), bias.stride(0)),
            EXPERTS=next_power_of_2(len(offsets)),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            num_warps=4,
        )


@triton.jit
def _find_row_expert_and_usage(row, offsets, num_experts, EXPERTS: tl.constexpr):
    """Return every row's expert, and whether the row is used; unused rows have the last expert."""
    number = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + number, mask=number < num_experts, other=2147483647)
    expert = tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)
    return tl.minimum(expert, num_experts - 1), expert < num_experts


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["count", "num_experts"])
def _add_bias_kernel(
    rows, bias, offsets, scale, result, count, width, num_experts, row_stride, bias_stride,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    expert, is_used = _find_row_expert_and_usage(row, offsets, num_experts, EXPERTS)
    inside = (row < count)[:, None] & (column < width)[None, :]
    at = bias + expert.to(tl.int64)[:, None] * bias_stride + column[None, :]
    added = tl.load(at, mask=inside & is_used[:, None], other=0.0).to(tl.float32)
    if scale is not None:
        factor = tl.load(scale + row, mask=(row < count) & is_used, other=0.0).to(tl.float32)
        added *= factor[:, None]
    x = tl.load(rows + row.to(tl.int64)[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
    total = (x.to(tl.float32) + added).to(result.dtype.element_ty)
    tl.store(result + row.to(tl.int64)[:, None] * width + column[None, :], total, mask=inside)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["num_experts"])
def _sum_rows_by_expert_kernel(
    grad, offsets, scale, sums, num_experts, width, row_stride, PARTS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # fmt: on
    """Store sums over every PARTS-th block in an expert's rows."""
    expert, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(begin + part * ROWS, end, PARTS * ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None] & (column < width)[None, :]
        at = grad + row.to(tl.int64)[:, None] * row_stride + column[None, :]
        values = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if scale is not None:
            values *= tl.load(scale + row, mask=row < end, other=0.0).to(tl.float32)[:, None]
        total += values
    at = sums + (part * num_experts + expert).to(tl.int64) * width + column
    tl.store(at, tl.sum(total, 0), mask=column < width)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["count", "num_experts"])
def _bias_products_kernel(
    grad, bias, offsets, result, count, width, num_experts, row_stride, bias_stride,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    # fmt: on
    """Store every row's gradient times its expert's bias, 0 for unused rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert, is_used = _find_row_expert_and_usage(row, offsets, num_experts, EXPERTS)
    is_used = is_used & (row < count)
    total = tl.zeros((ROWS, COLUMNS), tl.float64)  # products of a row cancel each other
    for begin in range(0, width, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        inside = is_used[:, None] & (column < width)[None, :]
        values = tl.load(grad + row.to(tl.int64)[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
        at = bias + expert.to(tl.int64)[:, None] * bias_stride + column[None, :]
        total += values.to(tl.float64) * tl.load(at, mask=inside, other=0.0).to(tl.float64)
    tl.store(result + row, tl.sum(total, 1).to(result.dtype.element_ty), mask=row < count)


add_expert_bias_triton = ExpertBias(_add_bias_by_expert, _sum_rows_by_expert, _sum_bias_products_by_row)
"""Addition of biases for float32, bfloat16 and float16."""
