"""RMSNorm: divide each vector by its root mean square, then weight it (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.operation import accumulation_dtype, as_new_alias, once_differentiable
from drawloom.kernels.results import NormAndSum


def rms_norm_eager(x: Tensor, weight: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """
    Return x / sqrt(mean(x^2) + eps) * weight over the last dimension of x (..., hidden_size), in x's dtype.

    weight (hidden_size,) in any float dtype; if `zero_centered`, the factor is 1 + weight. Computed in at least
    float32 and rounded once.
    """
    normed: Tensor = _RmsNorm.apply(x, weight, eps, zero_centered)  # type: ignore[no-untyped-call]
    return normed


def add_rms_norm_eager(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centered: bool = False
) -> NormAndSum:
    """
    Return the norm of x + residual, and the sum; all are (..., hidden_size), and results have x's dtype.

    The sum is rounded to x's dtype before it is normalized, as after a separate addition.
    """
    summed = (x + residual).to(x.dtype)
    return NormAndSum(rms_norm_eager(summed, weight, eps, zero_centered), summed)


class _RmsNorm(Function):
    """RMSNorm that saves x and one float32 per vector; plain autograd saves 3 tensors like x and takes 3x as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
        """Return a tensor like x (..., hidden_size); weight (hidden_size,) has any float dtype."""
        norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=accumulation_dtype(x))
        rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # 1 / sqrt(mean(x^2) + eps), (..., 1)
        ctx.save_for_backward(x, weight, rstd)
        ctx.zero_centered = zero_centered
        return as_new_alias((x * rstd).mul_(_widen_weight(weight, rstd.dtype, zero_centered)).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        grad, factor = grad.to(rstd.dtype), _widen_weight(weight, rstd.dtype, ctx.zero_centered)
        normed = x * rstd
        product = grad * normed
        grad_weight: Tensor | None = None
        if ctx.needs_input_grad[1]:
            # This gradient can't be deferred: a split backward pass would keep the product, which is as large as x.
            total = product.flatten(0, -2).sum(0) if product.ndim > 1 else product
            grad_weight = total.to(weight.dtype)
        along = product.matmul(factor / -max(x.shape[-1], 1)).unsqueeze(-1)
        grad_x = normed.mul_(along).addcmul_(grad, factor).mul_(rstd)
        return grad_x.to(x.dtype), grad_weight, None, None


def _widen_weight(weight: Tensor, wide: torch.dtype, zero_centered: bool) -> Tensor:
    """Return the factor for normalized vectors in a wide dtype: the weight, or 1 + weight."""
    return weight.to(wide) + 1 if zero_centered else weight.to(wide)
