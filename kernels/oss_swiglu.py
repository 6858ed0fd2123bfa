"""gpt-oss's clamped SwiGLU: (up + 1) * gate * sigmoid(alpha * gate), with bounds (OpenAI 2025, arXiv 2508.10925)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.operation import as_new_tensor, once_differentiable, upcast


def oss_swiglu_halves_eager(both: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
    """
    Return (up + 1) * gate * sigmoid(alpha * gate) for both (..., 2 * width), gate in the first half; (..., width).

    The gate is at most `limit`, and up is between -limit and limit. `scale` (...,) multiplies vectors. Computed in
    at least float32 and rounded once.
    """
    return _ClampedSwiGlu.apply(both, scale, alpha, limit)  # type: ignore[no-untyped-call, no-any-return]


class _ClampedSwiGlu(Function):
    """Clamped SwiGLU for autograd: saves only its arguments."""

    @staticmethod
    def forward(ctx: Any, both: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
        """Return (..., width) in the same dtype as both (..., 2 * width); scale is (...)."""
        ctx.save_for_backward(both, scale)
        ctx.bounds = alpha, limit
        return as_new_tensor(_compute(both, scale, alpha, limit))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        alpha, limit = ctx.bounds
        both, scale = ctx.saved_tensors
        gate, up = upcast(both).chunk(2, -1)
        bounded, factor = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
        sigmoid = torch.sigmoid(alpha * bounded)
        value, wide = bounded * sigmoid, upcast(grad)
        grad_scale = None if scale is None else (wide * factor * value).sum(-1).to(scale.dtype)
        if scale is not None:
            wide = wide * scale.unsqueeze(-1)
        grad_gate = (wide * factor * (sigmoid + alpha * value * (1 - sigmoid))).masked_fill(gate > limit, 0)
        grad_up = (wide * value).masked_fill(up.abs() > limit, 0)
        return torch.cat([grad_gate, grad_up], -1).to(both.dtype), grad_scale, None, None


def _compute(both: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
    gate, up = upcast(both).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    result = (up + 1) * gate * torch.sigmoid(alpha * gate)
    return (result if scale is None else result * scale.unsqueeze(-1)).to(both.dtype)
