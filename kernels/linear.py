"""A linear layer whose weight's gradient can be put off."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.kernels.deferred_grads import WeightGradient, deferring, weight_gradient_of


def linear_eager(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias: x (..., inputs), weight (outputs, inputs), bias (outputs,); gives (..., outputs)."""
    learns = weight.requires_grad and torch.is_grad_enabled()
    if not learns or torch.compiler.is_compiling() or weight.is_complex():
        return F.linear(x, weight, bias)  # complex gradients are conjugate, as only torch knows
    return _Linear.apply(x, weight, bias, weight_gradient_of(weight))  # type: ignore[no-untyped-call, no-any-return]


@deferring
class _Linear(Function):
    """The bias's gradient is one sum, and is never put off."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weight_gradient: WeightGradient) -> Tensor:
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.weight_gradient = weight_gradient
        y = F.linear(x, weight, bias)
        # With a bias torch returns a view, and forbids to change what a Function returns in place if it is one.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = None if weight is None else grad @ weight
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None
        grad_weight = ctx.weight_gradient(_weight_gradient, grad, x.detach()) if needs_weight else None
        return grad_x, grad_weight, grad_bias, None


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    return torch.mm(grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1]))
