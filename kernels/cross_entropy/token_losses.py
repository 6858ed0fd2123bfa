"""Losses by token for all implementations of cross entropy: shapes, weights, and factors of logit gradients."""

from typing import Any

import torch
from torch import Tensor

from drawloom.kernels.results import TokenLosses


def reshape_and_weight_losses(
    results: tuple[Tensor, Tensor], targets: Tensor, token_weights: Tensor | None
) -> TokenLosses:
    """
    Return losses and lse (tokens,) in the targets' shape (...), the losses times their tokens' weights, if any.

    Weights get no gradient.
    """
    losses, lse = (result.reshape(targets.shape) for result in results)
    return TokenLosses(losses if token_weights is None else losses * token_weights.detach(), lse)


def compute_logit_grad_factors(
    grad_losses: Tensor | None, grad_lse: Tensor | None, learned: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """
    Return two factors by token, (tokens,) in `dtype`, so that (softmax - onehot) * first + onehot * second is the
    logits' gradient.

    With loss = lse - target_logit, the gradient is softmax * (grad_losses + grad_lse) - onehot * grad_losses. The
    second factor is None if nothing depends on lse. `learned` (tokens,) is False for ignored targets, where the loss's
    gradient can be anything, even infinite, and counts as 0.
    """
    grad = torch.zeros_like(learned, dtype=dtype) if grad_losses is None else grad_losses.where(learned, 0)
    return (grad, None) if grad_lse is None else (grad + grad_lse, grad_lse.contiguous())


def pass_none_for_unused_grads(ctx: Any) -> None:
    """Let the backward pass get None instead of zeros for an output without a loss, to do less."""
    if not torch.compiler.is_compiling():  # torch 2.11's tracer does not know the call
        ctx.set_materialize_grads(False)
