"""Clamped SwiGLU of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), with bounds (OpenAI 2025, arXiv 2508.10925)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.operation import as_new_tensor, once_differentiable, upcast


def clamped_swiglu_halves_eager(both: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
    """
    Return (up + 1) * gate * sigmoid(alpha * gate) for both (..., 2 * width), gate in the first half; (..., width).

    The gate is at most `limit`, and up is between -limit and limit. `scale` (...,) multiplies each vector. Computed in
    at least float32 and rounded once.
    """
    return _ClampedSwiGlu.apply(both, scale, alpha, limit)  # type: ignore[no-untyped-call, no-any-return]


class _ClampedSwiGlu(Function):
    """Clamped SwiGLU that saves only its arguments, and repeats the forward pass in the backward pass."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
        """Return (..., width) in the dtype of both (..., 2 * width); scale is (...)."""
        ctx.save_for_backward(both, scale)
        ctx.bounds = alpha, limit
        return as_new_tensor(_compute(both, scale, alpha, limit))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        alpha, limit = ctx.bounds
        both, scale = (x if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors)
        inputs = [x for x in (both, scale) if x is not None]
        with torch.enable_grad():
            grads = torch.autograd.grad(_compute(both, scale, alpha, limit), inputs, grad)
        return grads[0], grads[1] if scale is not None else None, None, None


def _compute(both: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
    gate, up = upcast(both).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    result = (up + 1) * gate * torch.sigmoid(alpha * gate)
    return (result if scale is None else result * scale.unsqueeze(-1)).to(both.dtype)
