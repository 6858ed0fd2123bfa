"""GeGLU's gate: gelu(gate) * up, where gelu is the tanh approximation (Shazeer 2020, arXiv 2002.05202)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.kernels.operation import as_new_alias, make_differentiable, upcast


def geglu_eager(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up, computed in at least float32 and rounded once: gate and up (..., width) in one dtype."""
    return _differentiable_geglu(gate, up)


def _geglu(gate: Tensor, up: Tensor) -> Tensor:
    return as_new_alias(F.gelu(upcast(gate), approximate="tanh").mul_(up).to(gate.dtype))


def _geglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    wide_gate, wide_grad = upcast(gate), upcast(grad)
    grad_up = F.gelu(wide_gate, approximate="tanh").mul_(wide_grad)
    grad_gate = torch.ops.aten.gelu_backward(wide_grad * up, wide_gate, approximate="tanh")
    return grad_gate.to(gate.dtype), grad_up.to(up.dtype)


_differentiable_geglu = make_differentiable(_geglu, _geglu_backward)
