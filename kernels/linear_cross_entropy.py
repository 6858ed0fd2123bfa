"""Cross entropy of a linear layer's logits, a chunk of tokens at a time, so that all logits never exist together."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.deferred_grads import MatrixProduct, WeightGradient, deferring, weight_gradient_of
from drawloom.kernels.operation import accumulation_dtype, once_differentiable

MIN_CHUNK_TOKENS = 2048
MIN_CHUNK_LOGITS = 2**24
"""A chunk has at least so many tokens (matrix products of fewer rows are slower) and logits (64 MiB of float32)."""


def linear_cross_entropy_eager(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int = -100, token_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """
    Each token's loss, -log softmax(hidden @ weight.T)[target], and the log-sum-exp of its logits.

    hidden (..., width) and weight (vocabulary, width) of one dtype, targets int64 (...), token_weights float32 (...) by
    which losses are multiplied. Losses and lse are (...), at least float32; a loss is 0 where the target is
    `ignore_index`. Both are differentiable in hidden and weight.

    When all tokens fit one chunk their probabilities are kept for the backward pass; otherwise each chunk's are
    computed again. Only in the first case can the weight's gradient be deferred: it would need the gradients of all
    logits.
    """
    tokens = hidden.reshape(-1, hidden.shape[-1])
    weight_gradient = weight_gradient_of(weight)
    losses, lse = _LinearCrossEntropy.apply(tokens, weight, targets.reshape(-1), ignore_index, weight_gradient)  # type: ignore[no-untyped-call]
    return weighted(losses.reshape(targets.shape), token_weights), lse.reshape(targets.shape)


def weighted(losses: Tensor, token_weights: Tensor | None) -> Tensor:
    """Losses (...) times the weights (...) of their tokens, if there are any."""
    return losses if token_weights is None else losses * token_weights


def split_grads(
    grad_losses: Tensor | None, grad_lse: Tensor | None, learned: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """
    Factors by token, (tokens,) of `dtype`, of the logits' gradient: (softmax - onehot) * first + onehot * second.

    With loss = lse - target_logit, the gradient is softmax * (grad_losses + grad_lse) - onehot * grad_losses. The
    second is None if nothing depends on lse. `learned` (tokens,) says which targets are not ignored: where not, the
    gradient of the loss may be anything, infinite too, and counts as 0.
    """
    grad = torch.zeros_like(learned, dtype=dtype) if grad_losses is None else grad_losses.where(learned, 0)
    return (grad, None) if grad_lse is None else (grad + grad_lse, grad_lse.contiguous())


def skip_unused_grads(ctx: Any) -> None:
    """Let the backward pass see None, and not zeros, for an output that no loss depends on; it then does less."""
    if not torch.compiler.is_compiling():  # torch 2.11's tracer does not know the call
        ctx.set_materialize_grads(False)


@deferring
class _LinearCrossEntropy(Function):
    """hidden (tokens, width), weight (vocabulary, width), targets (tokens,)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, weight_gradient: WeightGradient
    ) -> tuple[Tensor, Tensor]:
        """The loss and the log-sum-exp of each token, both (tokens,), at least float32."""
        chunks = list(_chunks(len(hidden), len(weight)))
        losses = hidden.new_empty(len(hidden), dtype=accumulation_dtype(hidden))
        lse = torch.empty_like(losses)
        kept = None
        for chunk in chunks:
            log_probs, lse[chunk] = _log_softmax(hidden[chunk], weight)
            losses[chunk] = F.nll_loss(log_probs, targets[chunk], ignore_index=ignore_index, reduction="none")
            kept = log_probs if len(chunks) == 1 else None
            del log_probs  # or it would live until the next chunk's is computed
        ctx.save_for_backward(hidden, weight, targets, kept)
        ctx.ignore_index, ctx.weight_gradient = ignore_index, weight_gradient
        skip_unused_grads(ctx)
        return losses, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_losses: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, kept = ctx.saved_tensors
        learned = targets != ctx.ignore_index
        grads = split_grads(grad_losses, grad_lse, learned, accumulation_dtype(hidden))
        targets = targets.where(learned, 0)  # any index will do, as the factors there are 0
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        if kept is None:
            return *_in_chunks(hidden, weight, targets, *grads, needs_hidden, needs_weight), None, None, None
        grad_logits = _grad_logits(kept, targets, *grads).to(hidden.dtype)
        grad_hidden = grad_logits @ weight if needs_hidden else None
        grad_weight = ctx.weight_gradient(_weight_gradient, grad_logits, hidden.detach()) if needs_weight else None
        return grad_hidden, grad_weight, None, None, None


def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients, with each chunk's probabilities computed again; the weight's is summed in at least float32."""
    grad_hidden = torch.empty_like(hidden) if needs_hidden else None
    # A bfloat16 sum stops growing once it is 256 times as large as a part.
    grad_weight = torch.zeros_like(weight, dtype=accumulation_dtype(weight)) if needs_weight else None
    for chunk in _chunks(len(hidden), len(weight)):
        log_probs, _ = _log_softmax(hidden[chunk], weight)
        of_lse = None if grad_lse is None else grad_lse[chunk]
        grad_logits = _grad_logits(log_probs, targets[chunk], grad[chunk], of_lse).to(hidden.dtype)
        if grad_hidden is not None:
            torch.mm(grad_logits, weight, out=grad_hidden[chunk])
        if grad_weight is not None:
            grad_weight += _weight_gradient(grad_logits, hidden[chunk])
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


_weight_gradient = MatrixProduct(lambda grad_logits, hidden: (grad_logits.T, hidden))


def _chunks(tokens: int, vocab: int) -> Iterator[slice]:
    size = max(MIN_CHUNK_TOKENS, MIN_CHUNK_LOGITS // vocab)
    return (slice(start, start + size) for start in range(0, tokens, size))


def _log_softmax(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """log softmax of the logits (tokens, vocabulary), and their lse (tokens,)."""
    logits = hidden @ weight.T
    log_probs = F.log_softmax(logits, dim=-1, dtype=accumulation_dtype(hidden))
    # log p = logit - lse for every word; at the largest logit the difference rounds least.
    return log_probs, logits.amax(-1) - log_probs.amax(-1)


def _grad_logits(log_probs: Tensor, targets: Tensor, grad: Tensor, grad_lse: Tensor | None) -> Tensor:
    """softmax * grad - onehot * (grad - grad_lse), which is what `split_grads` says."""
    on_target = grad if grad_lse is None else grad - grad_lse
    result = log_probs.exp().mul_(grad.unsqueeze(-1))
    return result.scatter_add_(1, targets.unsqueeze(-1), -on_target.unsqueeze(-1))
