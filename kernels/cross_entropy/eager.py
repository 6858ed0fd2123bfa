"""
Cross entropy for a linear layer's logits; it keeps all probabilities for the backward pass if they fit.

More tokens than fit go through `cut_cross_entropy`, which computes logits again in the backward pass.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.cross_entropy.options import EXACT, LogitCut
from drawloom.kernels.cross_entropy.token_losses import (
    compute_logit_grad_factors,
    pass_none_for_unused_grads,
    reshape_and_weight_losses,
)
from drawloom.kernels.deferred_grads import (
    MatrixProduct,
    WeightGradient,
    compute_at_once_if_hooked,
    get_weight_gradient_function,
)
from drawloom.kernels.operation import accumulation_dtype, once_differentiable
from drawloom.kernels.results import TokenLosses

MIN_CHUNK_TOKENS = 2048
MIN_CHUNK_LOGITS = 2**24
"""A chunk has at least so many tokens (matrix products of fewer rows are slower) and logits (64 MiB of float32)."""


def linear_cross_entropy_eager(
    hidden: Tensor, weight: Tensor, targets: Tensor, cut: LogitCut = EXACT, token_weights: Tensor | None = None
) -> TokenLosses:
    """
    Return every token's loss, -log softmax(hidden @ weight.T)[target], and its logits' log-sum-exp.

    hidden (..., width) and weight (vocabulary, width) in one dtype, targets int64 (...), token_weights float32 (...),
    the losses' factors. Losses and lse are (...), at least float32; a loss is 0 where the target is
    `cut.ignore_index`. Both are differentiable in hidden and weight. Of `cut`, only `ignore_index` and `part` count.
    """
    chunk = max(MIN_CHUNK_TOKENS, MIN_CHUNK_LOGITS // len(weight))
    if cut.part is not None or targets.numel() > chunk:
        from drawloom.kernels.cross_entropy.cut import cut_cross_entropy_eager  # most runs on a CPU have small steps

    if cut.part is not None:
        return cut_cross_entropy_eager(hidden, weight, targets, cut, token_weights)
    if targets.numel() > chunk:
        in_chunks = LogitCut(ignore_index=cut.ignore_index, tile=(1, 1), max_logits=chunk * len(weight))
        return cut_cross_entropy_eager(hidden, weight, targets, in_chunks, token_weights)
    tokens, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    results = _WholeProbabilities.apply(tokens, weight, flat, cut.ignore_index, get_weight_gradient_function(weight))  # type: ignore[no-untyped-call]
    return reshape_and_weight_losses(results, targets, token_weights)


@compute_at_once_if_hooked
class _WholeProbabilities(Function):
    """Cross entropy for hidden (tokens, width), weight (vocabulary, width) and targets (tokens,)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, weight_gradient: WeightGradient
    ) -> tuple[Tensor, Tensor]:
        """Return every token's loss and log-sum-exp, both (tokens,), at least float32."""
        logits = hidden @ weight.T
        log_probs = F.log_softmax(logits, dim=-1, dtype=accumulation_dtype(hidden))
        # log p = logit - lse for every word; at the largest logit the difference rounds least.
        lse = logits.amax(-1) - log_probs.amax(-1)
        losses = F.nll_loss(log_probs, targets, ignore_index=ignore_index, reduction="none")
        ctx.save_for_backward(hidden, weight, targets, log_probs)
        ctx.ignore_index, ctx.weight_gradient = ignore_index, weight_gradient
        pass_none_for_unused_grads(ctx)
        return losses, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_losses: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, log_probs = ctx.saved_tensors
        learned = targets != ctx.ignore_index
        grad, of_lse = compute_logit_grad_factors(grad_losses, grad_lse, learned, accumulation_dtype(hidden))
        targets = targets.where(learned, 0)  # any index will do, as the factors there are 0
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        # softmax * grad - onehot * (grad - of_lse)
        on_target = grad if of_lse is None else grad - of_lse
        grad_logits = log_probs.exp().mul_(grad.unsqueeze(-1))
        grad_logits = grad_logits.scatter_add_(1, targets.unsqueeze(-1), -on_target.unsqueeze(-1)).to(hidden.dtype)
        grad_hidden = grad_logits @ weight if needs_hidden else None
        grad_weight = ctx.weight_gradient(_weight_gradient, grad_logits, hidden.detach()) if needs_weight else None
        return grad_hidden, grad_weight, None, None, None


_weight_gradient = MatrixProduct(lambda grad_logits, hidden: (grad_logits.T, hidden))
