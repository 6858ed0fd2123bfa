"""gpt-oss's clamped SwiGLU: (up + 1) * gate * sigmoid(alpha * gate), with bounds (OpenAI 2025, arXiv 2508.10925)."""

import torch
from torch import Tensor

from drawloom.kernels.operation import as_new_alias, make_differentiable, upcast


def oss_swiglu_halves_eager(gate_and_up: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
    """
    Return (up + 1) * gate * sigmoid(alpha * gate) for gate_and_up (..., 2 * width), gate in the first half; (...,
    width).

    The gate is at most `limit`, and up is between -limit and limit. `scale` (...,) multiplies vectors. Computed in
    at least float32 and rounded once.
    """
    return _differentiable_oss_swiglu(gate_and_up, scale, alpha, limit)  # type: ignore[no-any-return]


def _compute_gradients(
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


def _compute_oss_swiglu(gate_and_up: Tensor, scale: Tensor | None, alpha: float, limit: float) -> Tensor:
    gate, up = upcast(gate_and_up).chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    result = (up + 1) * gate * torch.sigmoid(alpha * gate)
    return as_new_alias((result if scale is None else result * scale.unsqueeze(-1)).to(gate_and_up.dtype))


_differentiable_oss_swiglu = make_differentiable(_compute_oss_swiglu, _compute_gradients)
