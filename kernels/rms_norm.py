"""RMSNorm: each vector divided by its root mean square, then weighted (Zhang and Sennrich 2019, arXiv 1910.07467)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.kernels.operation import own


def rms_norm_eager(x: Tensor, weight: Tensor, eps: float, zero_centred: bool = False) -> Tensor:
    """
    x / sqrt(mean(x^2) + eps) * weight over the last dimension of (..., width), in the dtype of x.

    A zero-centred weight is what the factor differs from 1 by. Computed in at least float32 and rounded once.
    """
    return _RmsNorm.apply(x, weight, eps, zero_centred)  # type: ignore[no-untyped-call, no-any-return]


def add_rms_norm_eager(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, zero_centred: bool = False
) -> tuple[Tensor, Tensor]:
    """
    The norm of x + residual, and the sum itself, both of shape (..., width).

    The sum is rounded to the dtype of x before it is normed, as it is where it is computed by itself.
    """
    summed = (x + residual).to(x.dtype)
    return rms_norm_eager(summed, weight, eps, zero_centred), summed


class _RmsNorm(Function):
    """Saves x and one number per vector; autograd's own graph would keep three tensors like x and take 3x as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, zero_centred: bool) -> Tensor:
        inverse = _inverse_root_mean_square(x, eps)
        ctx.save_for_backward(x, weight, inverse)
        ctx.zero_centred = zero_centred
        return own((x * inverse).mul_(_factor(weight, inverse.dtype, zero_centred)).to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        grad, factor = grad.to(inverse.dtype), _factor(weight, inverse.dtype, ctx.zero_centred)
        normed = x * inverse
        product = grad * normed
        grad_weight = _weight_gradient(product).to(weight.dtype) if ctx.needs_input_grad[1] else None
        along = product.matmul(factor / -max(x.shape[-1], 1)).unsqueeze(-1)
        grad_x = normed.mul_(along).addcmul_(grad, factor).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight, None, None


def _factor(weight: Tensor, wide: torch.dtype, zero_centred: bool) -> Tensor:
    return weight.to(wide) + 1 if zero_centred else weight.to(wide)


def _weight_gradient(product: Tensor) -> Tensor:
    """The sum over all vectors. A split backward can't gain by putting it off: what it sums would have to be kept."""
    return product.flatten(0, -2).sum(0) if product.ndim > 1 else product


def _inverse_root_mean_square(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of (..., width), as (..., 1) in at least float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
