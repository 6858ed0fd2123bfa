"""GeGLU's gate: gelu(gate) * up, where gelu is the tanh approximation (Shazeer 2020, arXiv 2002.05202)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.operation import as_new_alias, once_differentiable, upcast


def geglu_eager(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up, computed in at least float32 and rounded once: gate and up (..., width) in one dtype."""
    return _GeGluSavingInputs.apply(gate, up)  # type: ignore[no-untyped-call, no-any-return]


class _GeGluSavingInputs(Function):
    """GeGLU for autograd: saves only gate and up, and recomputes gelu(gate) in the backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        """Return a tensor like gate, for gate and up (..., width) in one dtype."""
        ctx.save_for_backward(gate, up)
        return as_new_alias(F.gelu(upcast(gate), approximate="tanh").mul_(up).to(gate.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        wide_gate, wide_grad = upcast(gate), upcast(grad)
        grad_up = F.gelu(wide_gate, approximate="tanh").mul_(wide_grad)
        grad_gate = torch.ops.aten.gelu_backward(wide_grad * up, wide_gate, approximate="tanh")
        return grad_gate.to(gate.dtype), grad_up.to(up.dtype)
