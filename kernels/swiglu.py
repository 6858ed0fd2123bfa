"""SwiGLU's gate: silu(gate) * up (Shazeer 2020, arXiv 2002.05202)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def swiglu_eager(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up for two tensors of one shape and dtype; computed in at least float32 and rounded once."""
    return _SwiGlu.apply(gate, up)  # type: ignore[no-untyped-call, no-any-return]


class _SwiGlu(Function):
    """Saves gate and up alone, and computes silu(gate) again for the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(_wide(gate)).mul_(up).to(gate.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        wide_gate, wide_grad = _wide(gate), _wide(grad)
        grad_up = F.silu(wide_gate).mul_(wide_grad)
        grad_gate = torch.ops.aten.silu_backward(wide_grad * up, wide_gate)
        return grad_gate.to(gate.dtype), grad_up.to(up.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
