"""SwiGLU's gate: silu(gate) * up (Shazeer 2020, arXiv 2002.05202)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def swiglu_eager(gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
    """
    silu(gate) * up for two tensors of one shape and dtype; computed in at least float32 and rounded once.

    `scale` (one dimension less) multiplies each vector before that: an expert's output may be weighted here, where it
    is one pass less, for the layer that follows is linear.
    """
    if scale is None:
        return _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call, no-any-return]
    return _ScaledSwiGlu.apply(gate, up, scale)  # type: ignore[no-untyped-call, no-any-return]


def swiglu_halves_eager(both: Tensor, scale: Tensor | None = None) -> Tensor:
    """The same of one tensor (..., 2 * width) that holds gate and up beside each other; gives (..., width)."""
    gate, up = both.chunk(2, -1)
    return swiglu_eager(gate, up, scale)


class _SwiGlu(Function):
    """Saves gate and up alone, and computes silu(gate) again for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(_accumulation_dtype(gate)).mul_(up).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return _gradients(gate, up, _accumulation_dtype(grad))


class _ScaledSwiGlu(Function):
    """The same with one more factor, whose gradient is found by the way."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, scale)
        return F.silu(_accumulation_dtype(gate)).mul_(up).mul_(scale.unsqueeze(-1)).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, scale = ctx.saved_tensors
        grad_scale = F.silu(_accumulation_dtype(gate)).mul_(up).mul_(grad).sum(-1).to(scale.dtype)
        return *_gradients(gate, up, _accumulation_dtype(grad) * scale.unsqueeze(-1)), grad_scale


def _gradients(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Of gate and up, from a gradient in at least float32."""
    wide_gate = _accumulation_dtype(gate)
    grad_up = F.silu(wide_gate).mul_(grad)
    grad_gate = torch.ops.aten.silu_backward(grad * up, wide_gate)
    return grad_gate.to(gate.dtype), grad_up.to(up.dtype)


def _accumulation_dtype(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
