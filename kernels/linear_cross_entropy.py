"""Cross entropy of a linear layer's logits, a chunk of tokens at a time, so that all logits never exist together."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.kernels.deferred_grads import WeightGradient, weight_gradient_of

LEAST_TOKENS = 2048
LEAST_LOGITS = 2**24
"""A chunk has at least so many tokens (below, matrix products slow down) and logits (64 MiB of float32)."""


def linear_cross_entropy_eager(hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int = -100) -> Tensor:
    """
    -log softmax(hidden @ weight.T)[target] by token: hidden (..., width), weight (vocabulary, width), targets (...).

    Gives (...) in at least float32, 0 where the target is `ignored`. When all tokens fit one chunk their
    probabilities are kept for the backward pass; otherwise each chunk's are computed again. Only in the first case can
    the weight's gradient be put off: it would need the gradients of all logits.
    """
    tokens = hidden.reshape(-1, hidden.shape[-1])
    later = weight_gradient_of(weight)
    losses = _LinearCrossEntropy.apply(tokens, weight, targets.reshape(-1), ignored, later)  # type: ignore[no-untyped-call]
    return losses.reshape(targets.shape)  # type: ignore[no-any-return]


class _LinearCrossEntropy(Function):
    """hidden (tokens, width), weight (vocabulary, width), targets (tokens,)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, weight_gradient: WeightGradient
    ) -> Tensor:
        chunks = list(_chunks(len(hidden), len(weight)))
        losses = hidden.new_empty(len(hidden), dtype=_accumulation_dtype(hidden))
        kept = None
        for chunk in chunks:
            found = _log_probabilities(hidden[chunk], weight)
            losses[chunk] = F.nll_loss(found, targets[chunk], ignore_index=ignored, reduction="none")
            kept = found if len(chunks) == 1 else None
            del found  # or it would live until the next chunk's is there
        ctx.save_for_backward(hidden, weight, targets, kept)
        ctx.ignored, ctx.weight_gradient = ignored, weight_gradient
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, kept = ctx.saved_tensors
        learned = targets != ctx.ignored
        grad, targets = grad.where(learned, 0), targets.where(learned, 0)
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        if kept is None:
            return *_in_chunks(hidden, weight, targets, grad, needs_hidden, needs_weight), None, None, None
        grad_logits = _grad_logits(kept, targets, grad).to(hidden.dtype)
        grad_hidden = grad_logits @ weight if needs_hidden else None
        grad_weight = ctx.weight_gradient(_weight_gradient, grad_logits, hidden.detach()) if needs_weight else None
        return grad_hidden, grad_weight, None, None, None


def _in_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, grad: Tensor, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients, with each chunk's probabilities computed again; the weight's is summed in at least float32."""
    grad_hidden = torch.empty_like(hidden) if needs_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=_accumulation_dtype(weight)) if needs_weight else None
    for chunk in _chunks(len(hidden), len(weight)):
        found = _log_probabilities(hidden[chunk], weight)
        grad_logits = _grad_logits(found, targets[chunk], grad[chunk]).to(hidden.dtype)
        if grad_hidden is not None:
            torch.mm(grad_logits, weight, out=grad_hidden[chunk])
        if grad_weight is not None:
            grad_weight += _weight_gradient(grad_logits, hidden[chunk])
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _weight_gradient(grad_logits: Tensor, hidden: Tensor) -> Tensor:
    return grad_logits.T @ hidden


def _chunks(tokens: int, vocabulary: int) -> Iterator[slice]:
    size = max(LEAST_TOKENS, LEAST_LOGITS // vocabulary)
    return (slice(start, start + size) for start in range(0, tokens, size))


def _log_probabilities(hidden: Tensor, weight: Tensor) -> Tensor:
    return F.log_softmax(hidden @ weight.T, dim=-1, dtype=_accumulation_dtype(hidden))


def _grad_logits(log_probabilities: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """(probability - [is the target]) * grad of the token's loss."""
    result = log_probabilities.exp().mul_(grad.unsqueeze(-1))
    return result.scatter_add_(1, targets.unsqueeze(-1), -grad.unsqueeze(-1))


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
