"""RMSNorm in Triton, with the float8 rows of its result from registers."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.float8.casts import Float8Rows, NormedRows
from drawloom.kernels.float8.triton_scales import (
    allocate_quantized_rows,
    compute_scale_and_inverse,
    get_magnitude_bits,
)
from drawloom.kernels.operation import register_kernel
from drawloom.kernels.triton.launch import cache_launches
from drawloom.kernels.triton.primitives import check_floats
from drawloom.kernels.triton.rms_norm import RmsNorm, allocate_norm, launch_forward, norm_rows


def norm_and_quantize_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
) -> NormedRows:
    """Compute `Float8Kernels.norm_and_quantize`: x and residual (..., width), weight (width,)."""
    check_floats("norm_and_quantize_triton", x, weight)
    normed, summed, data, scale = _RmsNormFloat8.apply(x, residual, weight, eps, zero_centered)  # type: ignore[no-untyped-call]
    return NormedRows(normed, x if residual is None else summed, Float8Rows(data, scale, data.new_empty(0)))


class _RmsNormFloat8(RmsNorm):
    """RMSNorm with quantized rows, without a gradient, beside its result."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
    ) -> tuple[Tensor, ...]:
        """Return the norm and the sum, both like x and residual (..., width), and quantized rows and scales."""
        normed, summed, rstd, data, scale = _forward(x, residual, weight, eps, zero_centered)
        RmsNorm.save(ctx, x if residual is None else summed, weight, rstd, zero_centered)
        ctx.mark_non_differentiable(data, scale)
        return normed, summed, data, scale


def _allocate_forward(x: Tensor, residual: Tensor | None) -> tuple[Tensor, ...]:
    return *allocate_norm(x, residual), *allocate_quantized_rows(x, x.shape[:-1].numel(), x.shape[-1])


@register_kernel("rms_norm_float8", _allocate_forward)
def _forward(
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    zero_centered: bool,
) -> None:
    launch_forward(_forward_kernel, results, x, residual, weight, eps, zero_centered)


# fmt: off
@cache_launches
@triton.jit(do_not_specialize=["count"])
def _forward_kernel(
    x, residual, weight, normed, summed, rstd, data, q_scale, count, width, x_stride, residual_stride, eps,
    ZERO_CENTRED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    # fmt: on
    result, row, column = norm_rows(
        x, residual, weight, normed, summed, rstd, count, width, x_stride, residual_stride, eps,
        ZERO_CENTRED, ROWS, BLOCK,
    )
    wide = result.to(tl.float32)
    scale, inverse = compute_scale_and_inverse(tl.max(get_magnitude_bits(wide), 1, keep_dims=True))
    inside = (row < count) & (column < width)
    tl.store(data + row * width + column, (wide * inverse).to(data.dtype.element_ty), mask=inside)
    tl.store(q_scale + row, scale, mask=row < count)
