"""
RMSNorm in Triton, alone or fused with the residual addition before it.

A program keeps whole rows in registers, so each pass reads and writes every element once. The weight's gradient is a
sum over all rows: each program sums its rows, and a second kernel adds the programs' sums in a fixed order, so that the
result is deterministic.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from triton.language import constexpr

from drawloom.kernels.operation import once_differentiable, register_kernel
from drawloom.kernels.results import NormAndSum
from drawloom.kernels.triton.primitives import (
    cache_launches,
    cdiv,
    check_floats,
    choose_tile_warp_count,
    load_float32,
    load_or_zero,
    next_power_of_2,
    sm_count,
    sum_partials,
    view_as_rows,
)

FORWARD_TILE, BACKWARD_TILE = 2048, 4096
"""Elements that a program processes at a time, 16 per thread; a longer row is one tile."""

PROGRAMS = 2
"""Programs of the backward pass per multiprocessor: while one waits for memory, the other computes."""


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """Compute rms_norm_eager for float32, bfloat16 and float16: x (..., hidden_size), weight (hidden_size,)."""
    check_floats("rms_norm_triton", x, weight)
    normed: Tensor = RmsNorm.apply(x, None, weight, eps, zero_centered)[0]  # type: ignore[no-untyped-call]
    return normed


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
) -> NormAndSum:
    """
    Compute add_rms_norm_eager for float32, bfloat16 and float16.

    x and residual (..., hidden_size), weight (hidden_size,); returns the norm and the sum, both (..., hidden_size).
    """
    check_floats("add_rms_norm_triton", x, residual, weight)
    return NormAndSum(*RmsNorm.apply(x, residual, weight, eps, zero_centered))  # type: ignore[no-untyped-call]


class RmsNorm(Function):
    """RMSNorm, perhaps after an addition; saves one float32 per row, and x or the sum, which exist anyway."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, ...]:
        """Return the norm and the sum, both like x and residual (..., hidden_size); weight is (hidden_size,)."""
        normed, summed, rstd = _forward(x, residual, weight, eps, zero_centered)
        RmsNorm.save(ctx, x if residual is None else summed, weight, rstd, zero_centered)
        return normed, summed

    @staticmethod
    def save(ctx: Any, summed: Tensor, weight: Tensor, rstd: Tensor, zero_centered: bool) -> None:
        """Save x or the sum (..., hidden_size), and 1 / rms by row, for the backward pass."""
        ctx.save_for_backward(summed, weight, rstd)
        ctx.zero_centered = zero_centered
        ctx.set_materialize_grads(False)  # an unused sum has none

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_summed: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if grad is None:
            if grad_summed is None:
                return (None,) * 5
            grad = torch.zeros_like(grad_summed)
        (x, weight, rstd), (_, has_residual, needs_weight, *_) = ctx.saved_tensors, ctx.needs_input_grad
        grad_x, grad_weight = _backward(grad, grad_summed, x, weight, rstd, ctx.zero_centered, needs_weight)
        return grad_x, grad_x if has_residual else None, grad_weight if needs_weight else None, None, None


def allocate_norm(x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm, the sum if there is a residual, and 1 / rms by row, all empty."""
    summed = x.new_empty(x.shape if residual is not None else 0)
    return x.new_empty(x.shape), summed, x.new_empty(x.shape[:-1], dtype=torch.float32)


@register_kernel("rms_norm", allocate_norm)
def _forward(
    results: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
) -> None:
    launch_forward(_norm_kernel, [*results], x, residual, weight, eps, zero_centered)


def launch_forward(
    kernel: Any,
    results: Sequence[Tensor],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
) -> None:
    """Launch a kernel to fill `allocate_norm`'s results for x and residual (..., width), and perhaps more."""
    normed, summed, *others = results
    if not x.numel():
        return
    rows, added = view_as_rows(x), None if residual is None else view_as_rows(residual)
    count, width = rows.shape
    block = next_power_of_2(width)
    tile_rows = max(1, FORWARD_TILE // block)  # whatever the number of rows, so that a row keeps its bits
    kernel[(cdiv(count, tile_rows),)](
        rows,
        added,
        weight.contiguous(),
        normed,
        None if added is None else summed,
        *others,
        count,
        width,
        rows.stride(0),
        0 if added is None else added.stride(0),
        eps,
        ZERO_CENTRED=zero_centered,
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=choose_tile_warp_count(tile_rows * block),
    )


@register_kernel(
    "rms_norm_backward",
    lambda x, weight, needs_weight: (x.new_empty(x.shape), weight.new_empty(weight.shape if needs_weight else 0)),
)
def _backward(
    input_grads: tuple[Tensor, Tensor],
    grad: Tensor,
    grad_summed: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    zero_centered: bool,
    needs_weight: bool,
) -> None:
    grad_x, grad_weight = input_grads
    if not x.numel():
        grad_weight.zero_()
        return
    rows, grads, more = view_as_rows(x), view_as_rows(grad), None
    if grad_summed is not None and grad_summed.numel():  # compiled graphs pass a gradient of the empty sum
        more = view_as_rows(grad_summed)
    count, width = rows.shape
    block = next_power_of_2(width)
    tile_rows = max(1, min(BACKWARD_TILE // block, next_power_of_2(count)))
    programs = min(cdiv(count, tile_rows), PROGRAMS * sm_count(x.device))
    parts = x.new_empty(programs, width, dtype=torch.float32) if needs_weight else None
    _backward_kernel[(programs,)](
        grads,
        more,
        rows,
        weight.contiguous(),
        rstd,
        grad_x,
        parts,
        count,
        width,
        grads.stride(0),
        0 if more is None else more.stride(0),
        rows.stride(0),
        ZERO_CENTRED=zero_centered,
        ROWS=tile_rows,
        BLOCK=block,
        num_warps=choose_tile_warp_count(tile_rows * block),
    )
    if parts is not None:
        sum_partials(parts, grad_weight)


# fmt: off
@triton.jit
def norm_rows(
    x, residual, weight, normed, summed, rstd, count, width, x_stride, residual_stride, eps,
    ZERO_CENTRED: constexpr, ROWS: constexpr, BLOCK: constexpr,
):
    # fmt: on
    """
    Norm the program's rows in x, or in x + residual, and store this sum, the norm and rstd.

    Return the stored norm (ROWS, BLOCK), and its rows (ROWS, 1) and columns (1, BLOCK), for a kernel that casts it.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < count) & (column < width)
    values = load_or_zero(x + row * x_stride + column, inside)
    if residual is not None:
        values = values.to(tl.float32) + load_or_zero(residual + row * residual_stride + column, inside)
        # Rounded before the norm, like the sum that the next layer reads.
        values = values.to(summed.dtype.element_ty)
        tl.store(summed + row * width + column, values, mask=inside)
    values = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1, keep_dims=True) / width + eps)
    factors = load_float32(weight + column, column < width)
    if ZERO_CENTRED:
        factors += 1.0
    tl.store(rstd + row, scale, mask=row < count)
    result = (values * scale * factors).to(normed.dtype.element_ty)
    tl.store(normed + row * width + column, result, mask=inside)
    return result, row, column


# fmt: off
@cache_launches("count")
def _norm_kernel(
    x, residual, weight, normed, summed, rstd, count, width, x_stride, residual_stride, eps,
    ZERO_CENTRED: constexpr, ROWS: constexpr, BLOCK: constexpr,
):
    # fmt: on
    norm_rows(
        x, residual, weight, normed, summed, rstd, count, width, x_stride, residual_stride, eps,
        ZERO_CENTRED, ROWS, BLOCK,
    )


# fmt: off
@cache_launches("count")
def _backward_kernel(
    grad, grad_summed, x, weight, rstd, grad_x, parts, count, width, grad_stride, grad_summed_stride, x_stride,
    ZERO_CENTRED: constexpr, ROWS: constexpr, BLOCK: constexpr,
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    within = column < width
    factors = load_float32(weight + column, within)
    if ZERO_CENTRED:
        factors += 1.0
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(program * ROWS, count, tl.num_programs(0) * ROWS, num_stages=3):
        row = first + tl.arange(0, ROWS).to(tl.int64)[:, None]
        inside = (row < count) & within
        values = load_float32(x + row * x_stride + column, inside)
        grads = load_float32(grad + row * grad_stride + column, inside)
        scale = load_or_zero(rstd + row, row < count)
        unit = values * scale
        total += grads * unit
        grads *= factors
        along = tl.sum(grads * unit, 1, keep_dims=True) / width
        result = (grads - unit * along) * scale
        if grad_summed is not None:
            result += load_float32(grad_summed + row * grad_summed_stride + column, inside)
        tl.store(grad_x + row * width + column, result, mask=inside)
    if parts is not None:
        tl.store(parts + program * width + tl.arange(0, BLOCK), tl.sum(total, 0), mask=tl.arange(0, BLOCK) < width)
