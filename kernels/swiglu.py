"""SwiGLU's gate: silu(gate) * up (Shazeer 2020, arXiv 2002.05202)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.kernels.operation import as_new_alias, make_differentiable, upcast


def swiglu_eager(gate: Tensor, up: Tensor, scale: Tensor | None = None) -> Tensor:
    """
    Return silu(gate) * up for gate and up (..., width) in one dtype, computed in at least float32 and rounded once.

    `scale` (...,) multiplies each vector before rounding. An expert's output can be weighted here instead of after its
    down projection, which is linear; this saves a pass over memory.
    """
    return _differentiable_swiglu(gate, up) if scale is None else _differentiable_swiglu_with_scale(gate, up, scale)


def swiglu_halves_eager(gate_and_up: Tensor, scale: Tensor | None = None) -> Tensor:
    """
    Compute swiglu_eager of gate_and_up (..., 2 * width), gate in the first half, up in the second; return (..., width).
    """
    gate, up = gate_and_up.chunk(2, -1)
    return swiglu_eager(gate, up, scale)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return as_new_alias(F.silu(upcast(gate)).mul_(up).to(gate.dtype))


def compute_swiglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, computed in at least float32; all tensors are (..., width)."""
    wide_gate, wide_grad = upcast(gate), upcast(grad)
    grad_up = F.silu(wide_gate).mul_(wide_grad)
    grad_gate = torch.ops.aten.silu_backward(wide_grad * up, wide_gate)
    return grad_gate.to(gate.dtype), grad_up.to(up.dtype)


def _swiglu_with_scale(gate: Tensor, up: Tensor, scale: Tensor) -> Tensor:
    return as_new_alias(F.silu(upcast(gate)).mul_(up).mul_(scale.unsqueeze(-1)).to(gate.dtype))


def _swiglu_with_scale_backward(grad: Tensor, gate: Tensor, up: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    grad_scale = F.silu(upcast(gate)).mul_(up).mul_(grad).sum(-1).to(scale.dtype)
    return *compute_swiglu_gradients(upcast(grad) * scale.unsqueeze(-1), gate, up), grad_scale


_differentiable_swiglu = make_differentiable(_swiglu, compute_swiglu_gradients)
_differentiable_swiglu_with_scale = make_differentiable(_swiglu_with_scale, _swiglu_with_scale_backward)
