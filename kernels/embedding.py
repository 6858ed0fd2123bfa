"""A table of vectors, one for each token, whose gradient can be put off."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.kernels.deferred_grads import WeightGradient, deferring, weight_gradient_of


def embedding_eager(tokens: Tensor, weight: Tensor) -> Tensor:
    """weight[tokens]: tokens int32 or int64 (...), weight (vocabulary, width); gives (..., width)."""
    learns = weight.requires_grad and torch.is_grad_enabled()
    if not learns or torch.compiler.is_compiling():
        return F.embedding(tokens, weight)
    return _Embedding.apply(tokens, weight, weight_gradient_of(weight))  # type: ignore[no-untyped-call, no-any-return]


@deferring
class _Embedding(Function):
    """Saves the tokens alone."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, weight_gradient: WeightGradient) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows = len(weight)
        ctx.weight_gradient = weight_gradient
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        (tokens,) = ctx.saved_tensors
        return None, ctx.weight_gradient(partial(_weight_gradient, ctx.rows), grad, tokens), None


def _weight_gradient(rows: int, grad: Tensor, tokens: Tensor) -> Tensor:
    """The gradients of all tokens, added up by their rows of the table."""
    summed: Tensor = torch.ops.aten.embedding_dense_backward(grad, tokens, rows, -1, False)
    return summed
