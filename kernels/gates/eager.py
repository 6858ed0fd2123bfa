"""
SwiGLU's gate: silu(gate) * up (Shazeer 2020, arXiv 2002.05202).

GeGLU's gate: gelu(gate) * up, where gelu is the tanh approximation (Shazeer 2020, arXiv 2002.05202).

gpt-oss's clamped SwiGLU: (up + 1) * gate * sigmoid(alpha * gate), with bounds (OpenAI 2025, arXiv 2508.10925).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.kernels.operation import as_new_alias, differentiable, upcast


def compute_swiglu_gradients(grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor | None = None) -> tuple[Tensor, ...]:
    """
    Return the gradients of gate and up (..., width), computed in at least float32, and of the scale (...,), if any.
    """
    wide_gate, wide_grad = upcast(gate), upcast(grad)
    grad_scale: tuple[Tensor, ...] = ()
    if scale is not None:
        grad_scale = (F.silu(wide_gate).mul_(up).mul_(grad).sum(-1).to(scale.dtype),)
        wide_grad = wide_grad * scale.unsqueeze(-1)
    grad_up = F.silu(wide_gate).mul_(wide_grad)
    grad_gate = torch.ops.aten.silu_backward(wide_grad * up, wide_gate)
    return grad_gate.to(gate.dtype), grad_up.to(up.dtype), *grad_scale


@differentiable(compute_swiglu_gradients)
def swiglu_eager(gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
    """
    Return silu(gate) * up for gate and up (..., width) in one dtype, computed in at least float32 and rounded once.

    `scale` (...,) multiplies each vector before rounding. An expert's output can be weighted here instead of after its
    down projection, which is linear; this saves a pass over memory.
    """
    product = F.silu(upcast(gate)).mul_(up)
    return as_new_alias((product if scale is None else product.mul_(scale.unsqueeze(-1))).to(gate.dtype))


def swiglu_halves_eager(gate_and_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """
    Compute swiglu_eager of gate_and_up (..., 2 * width), gate in the first half, up in the second; return (..., width).
    """
    gate, up = gate_and_up.chunk(2, -1)
    return swiglu_eager(gate, up, scale)


def _compute_geglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    wide_gate, wide_grad = upcast(gate), upcast(grad)
    grad_up = F.gelu(wide_gate, approximate="tanh").mul_(wide_grad)
    grad_gate = torch.ops.aten.gelu_backward(wide_grad * up, wide_gate, approximate="tanh")
    return grad_gate.to(gate.dtype), grad_up.to(up.dtype)


@differentiable(_compute_geglu_gradients)
def geglu_eager(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up, computed in at least float32 and rounded once: gate and up (..., width) in one dtype."""
    return as_new_alias(F.gelu(upcast(gate), approximate="tanh").mul_(up).to(gate.dtype))


def _compute_oss_swiglu_gradients(
    grad: Tensor, gate_and_up: Tensor, scale: Tensor | None, alpha: float, limit: float
) -> tuple[Tensor, Tensor | None]:
    gate, up = upcast(gate_and_up).chunk(2, -1)
    bounded, factor = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    sigmoid = torch.sigmoid(alpha * bounded)
    value, wide = bounded * sigmoid, upcast(grad)
    grad_scale = None if scale is None else (wide * factor * value).sum(-1).to(scale.dtype)
    if scale is not None:
        wide = wide * scale.unsqueeze(-1)
    grad_gate = (wide * factor * (sigmoid + alpha * value * (1 - sigmoid))).masked_fill(gate > limit, 0)
    grad_up = (wide * value).masked_fill(up.abs() > limit, 0)
    return torch.cat([grad_gate, grad_up], -1).to(gate_and_up.dtype), grad_scale


@differentiable(_compute_oss_swiglu_gradients)
def oss_swiglu_halves_eager(gate_and_up: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
    """
    Return (up + 1) * gate * sigmoid(alpha * gate) for gate_and_up (..., 2 * width), gate in the first half; (...,
    width).

    The gate is at most `limit`, and up is between -limit and limit. `scale` (...,) multiplies vectors. Computed in
    at least float32 and rounded once.
    """
    gate, up = upcast(gate_and_up).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    result = (up + 1) * gate * torch.sigmoid(alpha * gate)
    return as_new_alias((result if scale is None else result * scale.unsqueeze(-1)).to(gate_and_up.dtype))
