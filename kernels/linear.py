"""Linear layers and embeddings whose weight gradients can be deferred."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.deferred_grads import (
    Addable,
    MatrixProduct,
    WeightGradient,
    compute_at_once_if_hooked,
    get_weight_gradient_function,
)
from drawloom.kernels.operation import once_differentiable


def linear_eager(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias (..., outputs): x (..., inputs), weight (outputs, inputs), bias (outputs,)."""
    learns = weight.requires_grad and torch.is_grad_enabled()
    if not learns or torch.compiler.is_compiling() or weight.is_complex():
        return F.linear(x, weight, bias)  # gradients of complex weights are conjugated, which _Linear does not do
    return _Linear.apply(x, weight, bias, get_weight_gradient_function(weight))  # type: ignore[no-untyped-call, no-any-return]


@compute_at_once_if_hooked
class _Linear(Function):
    """Linear layer that can defer its weight's gradient; the bias's gradient is a cheap sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weight_gradient: WeightGradient) -> Tensor:
        """Return (..., outputs): x (..., inputs), weight (outputs, inputs), bias (outputs,), all with one dtype."""
        ctx.save_for_backward(x, weight if ctx.needs_input_grad[0] else None)
        ctx.weight_gradient = weight_gradient
        y = F.linear(x, weight, bias)
        # With a bias, F.linear returns a view. Autograd forbids in-place changes to a view that a Function returns.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad_x = None if weight is None else grad @ weight
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None
        grad_weight = ctx.weight_gradient(LINEAR_WEIGHT_GRADIENT, grad, x.detach()) if needs_weight else None
        return grad_x, grad_weight, grad_bias, None


LINEAR_WEIGHT_GRADIENT = MatrixProduct(
    lambda grad, x: (grad.reshape(-1, grad.shape[-1]).t(), x.reshape(-1, x.shape[-1]))
)


def embedding_eager(tokens: Tensor, weight: Tensor) -> Tensor:
    """Return weight[tokens] (..., hidden_size): tokens int32 or int64 (...), weight (vocab_size, hidden_size)."""
    learns = weight.requires_grad and torch.is_grad_enabled()
    if not learns or torch.compiler.is_compiling():
        return F.embedding(tokens, weight)
    return _Embedding.apply(tokens, weight, get_weight_gradient_function(weight))  # type: ignore[no-untyped-call, no-any-return]


@compute_at_once_if_hooked
class _Embedding(Function):
    """Embedding that saves only the tokens, and can defer its weight's gradient."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, weight_gradient: WeightGradient) -> Tensor:
        """Return (..., hidden_size) like weight (vocab_size, hidden_size), for tokens int32 or int64 (...)."""
        ctx.save_for_backward(tokens)
        ctx.rows = len(weight)
        ctx.weight_gradient = weight_gradient
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (tokens,) = ctx.saved_tensors
        return None, ctx.weight_gradient(_EmbeddingGradient(ctx.rows), grad, tokens), None


@dataclass(frozen=True)
class _EmbeddingGradient(Addable):
    """Gradient of a table with `rows` rows: gradients (..., hidden_size) summed by token (...)."""

    rows: int

    def __call__(self, grad: Tensor, tokens: Tensor) -> Tensor:  # type: ignore[override]
        summed: Tensor = torch.ops.aten.embedding_dense_backward(grad, tokens, self.rows, -1, False)
        return summed

    def compute_in_dtype(self, dtype: torch.dtype, grad: Tensor, tokens: Tensor) -> Tensor:  # type: ignore[override]
        return self(grad.to(dtype), tokens)

    def add_to(self, summed: Tensor, grad: Tensor, tokens: Tensor) -> None:  # type: ignore[override]
        """Sum gradients by token, then add one sum to every distinct token's row; additions have a fixed order."""
        ordered, order = tokens.reshape(-1).sort(stable=True)
        begins = torch.ones_like(ordered, dtype=torch.bool)
        begins[1:] = ordered[1:] != ordered[:-1]
        number = begins.cumsum(0) - 1  # index among the distinct tokens
        sums = _EmbeddingGradient(len(ordered)).compute_in_dtype(
            summed.dtype, grad.reshape(-1, grad.shape[-1])[order], number
        )
        # There may be fewer distinct tokens than tokens; the other sums are zeros, which can go to any row.
        rows = torch.arange(len(ordered), device=ordered.device, dtype=ordered.dtype) % self.rows
        summed.index_add_(0, rows.scatter_(0, number, ordered), sums)
