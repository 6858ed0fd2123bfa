"""SwiGLU's gate: silu(gate) * up (Shazeer 2020, arXiv 2002.05202)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.operation import as_new_alias, once_differentiable, upcast


def swiglu_eager(gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
    """
    Return silu(gate) * up for gate and up (..., width) in one dtype, computed in at least float32 and rounded once.

    `scale` (...,) multiplies each vector before rounding. An expert's output can be weighted here instead of after its
    down projection, which is linear; this saves a pass over memory.
    """
    if scale is None:
        return _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call, no-any-return]
    return _ScaledSwiGlu.apply(gate, up, scale)  # type: ignore[no-untyped-call, no-any-return]


def swiglu_halves_eager(gate_and_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """
    Compute swiglu_eager of gate_and_up (..., 2 * width), gate in the first half, up in the second; return (..., width).
    """
    gate, up = gate_and_up.chunk(2, -1)
    return swiglu_eager(gate, up, scale)


class _SwiGlu(Function):
    """SwiGLU that saves only gate and up, and recomputes silu(gate) in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Return a tensor like gate, for gate and up (..., width) in one dtype."""
        ctx.save_for_backward(gate, up)
        return as_new_alias(F.silu(upcast(gate)).mul_(up).to(gate.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return compute_swiglu_gradients(gate, up, upcast(grad))


class _ScaledSwiGlu(Function):
    """SwiGLU with a scale per vector."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
        """Return a tensor like gate, for gate and up (..., width) in one dtype and scale (...)."""
        ctx.save_for_backward(gate, up, scale)
        return as_new_alias(F.silu(upcast(gate)).mul_(up).mul_(scale.unsqueeze(-1)).to(gate.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, scale = ctx.saved_tensors
        grad_scale = F.silu(upcast(gate)).mul_(up).mul_(grad).sum(-1).to(scale.dtype)
        return *compute_swiglu_gradients(gate, up, upcast(grad) * scale.unsqueeze(-1)), grad_scale


def compute_swiglu_gradients(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up from the output's gradient in at least float32."""
    wide_gate = upcast(gate)
    grad_up = F.silu(wide_gate).mul_(grad)
    grad_gate = torch.ops.aten.silu_backward(grad * up, wide_gate)
    return grad_gate.to(gate.dtype), grad_up.to(up.dtype)
