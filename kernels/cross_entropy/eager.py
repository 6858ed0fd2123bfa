"""
Vocabulary-parallel cross entropy: every rank computes with its rows of the output weight; one exchange joins them.

Cross entropy on a linear layer's logits, cut into tiles, which are computed twice and never kept.

Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009. The forward pass keeps the
tokens' log-sum-exp. The backward pass computes logit gradients again, some tokens at a time. With `filter_eps` it skips
tiles in which all gradients are small; to this end the vocabulary's words are first sorted by their mean logits, so
that improbable words share tiles.

Cross entropy for a linear layer's logits; it keeps all probabilities for the backward pass if they fit.

More tokens than fit go through `cut_cross_entropy`, which computes logits again in the backward pass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.cross_entropy.logsumexp import logsumexp_in_fixed_order
from drawloom.kernels.cross_entropy.options import EXACT, LogitCut, SplitVocabulary
from drawloom.kernels.deferred_grads import (
    MatrixProduct,
    WeightGradient,
    compute_at_once_if_hooked,
    get_weight_gradient_function,
)
from drawloom.kernels.operation import accumulation_dtype, once_differentiable, upcast
from drawloom.kernels.results import TokenLosses

NOT_HERE = -1
"""Local target of a token whose target is a row of another rank, or is ignored."""


def find_local_target_rows(targets: Tensor, rows: int, ignore_index: int, part: SplitVocabulary | None) -> Tensor:
    """Return the targets' local rows, int64 (tokens,), or -1 if they are on another rank or ignored."""
    is_learned = targets != ignore_index
    if part is None:
        return targets.where(is_learned, NOT_HERE)
    local = targets - part.first
    return local.where(is_learned & (local >= 0) & (local < rows), NOT_HERE)


def combine_lse_and_target_logit_over_ranks(
    lse: Tensor, target_logit: Tensor, part: SplitVocabulary | None
) -> tuple[Tensor, Tensor]:
    """
    Return log-sum-exp and target logit by token over the whole vocabulary.

    All are float32 (tokens,). `lse` and `target_logit` come from this rank's part; a target on another rank has logit
    0.
    """
    if part is None:
        return lse, target_logit
    gathered = part.group.gather(torch.stack((lse, target_logit)))
    # Exactly one part has the target, and the others contribute 0.
    return logsumexp_in_fixed_order(gathered[:, 0].T), gathered[:, 1].sum(0)


def all_reduce_gradient(gradient: Tensor, part: SplitVocabulary | None) -> Tensor:
    """Sum a replicated tensor's gradient (any shape) over all parts, in place."""
    if part is not None:
        part.group.sum(gradient)
    return gradient


class NeededGradients(NamedTuple):
    """Flags for a backward pass's gradients."""

    hidden: bool
    weight: bool


class CutCrossEntropy(NamedTuple):
    """
    Cut cross entropy by both passes over hidden (tokens, width), weight (vocabulary, width) and targets (tokens,), -1
    on other ranks.

    `forward` returns log-sum-exp and target logit by token, 0 where the target is -1, both float32 (tokens,).
    `backward` accepts the lse over the whole vocabulary and the two factors from `compute_logit_grad_factors`, and
    returns the requested gradients.
    """

    forward: Callable[[Tensor, Tensor, Tensor, LogitCut], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, LogitCut, NeededGradients],
        tuple[Tensor | None, Tensor | None],
    ]

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        cut: LogitCut = EXACT,
        token_weights: Tensor | None = None,
    ) -> TokenLosses:
        """
        Return by token the loss, -log softmax(hidden @ weight.T)[target], and the logits' log-sum-exp.

        hidden (..., width) and weight (vocabulary, width) with one dtype, targets int64 (...), token_weights float32
        (...), the factors of the losses. Losses and lse are (...), at least float32; a loss is 0 where the target is
        `cut.ignore_index`. Both are differentiable in hidden and weight.
        """
        tokens, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
        weight_gradient = get_weight_gradient_function(weight)
        results = _CutCrossEntropy.apply(tokens, weight, flat, cut, self, weight_gradient)  # type: ignore[no-untyped-call]
        return reshape_and_weight_losses(results, targets, token_weights)


def reshape_and_weight_losses(
    results: tuple[Tensor, Tensor], targets: Tensor, token_weights: Tensor | None
) -> TokenLosses:
    """Return losses and lse (tokens,) in the targets' shape (...), the losses times their tokens' weights, if any."""
    losses, lse = (result.reshape(targets.shape) for result in results)
    return TokenLosses(multiply_by_token_weights(losses, token_weights), lse)


def multiply_by_token_weights(losses: Tensor, token_weights: Tensor | None) -> Tensor:
    """Multiply losses (...) by their tokens' weights (...), if any."""
    return losses if token_weights is None else losses * token_weights


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


@compute_at_once_if_hooked
class _CutCrossEntropy(Function):
    """Cross entropy that saves its inputs, hidden (tokens, width), weight and targets (tokens,), and lse."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        cut: LogitCut,
        implementation: CutCrossEntropy,
        weight_gradient: WeightGradient,
    ) -> tuple[Tensor, Tensor]:
        """Return loss and log-sum-exp by token, both (tokens,), at least float32."""
        local = find_local_target_rows(targets, len(weight), cut.ignore_index, cut.part)
        lse, target_logit = combine_lse_and_target_logit_over_ranks(
            *implementation.forward(hidden, weight, local, cut), cut.part
        )
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.cut, ctx.implementation, ctx.weight_gradient = cut, implementation, weight_gradient
        pass_none_for_unused_grads(ctx)
        return (lse - target_logit).where(targets != cut.ignore_index, 0), lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_losses: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, lse = ctx.saved_tensors
        grad, grad_lse = compute_logit_grad_factors(grad_losses, grad_lse, targets != ctx.cut.ignore_index, lse.dtype)
        local = find_local_target_rows(targets, len(weight), ctx.cut.ignore_index, ctx.cut.part)
        needs, inputs = NeededGradients(*ctx.needs_input_grad[:2]), (hidden, weight, local, lse, grad)
        # A deferred weight gradient computes the logits a third time, in exchange for keeping none.
        if needs.weight and getattr(ctx.weight_gradient, "active", False):
            optional = () if grad_lse is None else (grad_lse,)
            ctx.weight_gradient(_DeferredWeightGradient(ctx.implementation, ctx.cut), *inputs, *optional)
            needs = NeededGradients(needs.hidden, False)
        grad_hidden, grad_weight = ctx.implementation.backward(*inputs, grad_lse, ctx.cut, needs)
        if grad_hidden is not None:
            grad_hidden = all_reduce_gradient(grad_hidden, ctx.cut.part)
        return grad_hidden, grad_weight, None, None, None, None


@dataclass(frozen=True)
class _DeferredWeightGradient:
    """Function for a deferred weight gradient, given an implementation's `backward` arguments."""

    implementation: CutCrossEntropy
    cut: LogitCut

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        lse: Tensor,
        grad: Tensor,
        grad_lse: Tensor | None = None,
    ) -> Tensor:
        inputs = hidden, weight, targets, lse, grad, grad_lse
        _, grad_weight = self.implementation.backward(*inputs, self.cut, NeededGradients(False, True))
        return grad_weight  # type: ignore[return-value]


def split_token_chunks(tokens: int, vocab: int, cut: LogitCut) -> Iterator[slice]:
    """Return token slices in whole tiles, with at most the number of logits that may exist together."""
    size = max(1, cut.max_logits // (vocab * cut.tile[0])) * cut.tile[0]
    return (slice(start, start + size) for start in range(0, tokens, size))


def count_logits_bytes(hidden: Tensor, weight: Tensor, max_logits: int) -> int:
    """Return how many logit bytes exist together, for hidden (tokens, width) and weight (vocabulary, width)."""
    return min(len(hidden) * len(weight), max_logits) * hidden.dtype.itemsize


def sort_vocabulary_by_mean_logit(hidden: Tensor, weight: Tensor) -> Tensor:
    """
    Return the words of the vocabulary, int64 (vocabulary,), from the least to the greatest mean logit over the tokens.

    hidden (tokens, width), weight (vocabulary, width). A word's mean logit is its logit for the mean hidden state.
    """
    # The mean of many bfloat16 numbers would be too coarse to sort by.
    return (upcast(weight) @ upcast(hidden).mean(0)).argsort()


def _compute_lse_and_target_logit(
    hidden: Tensor, weight: Tensor, targets: Tensor, cut: LogitCut
) -> tuple[Tensor, Tensor]:
    lse = hidden.new_empty(len(hidden), dtype=accumulation_dtype(hidden))
    target_logit = torch.zeros_like(lse)
    for chunk in split_token_chunks(len(hidden), len(weight), cut):
        logits = _compute_logits(hidden[chunk], weight)
        lse[chunk] = logsumexp_in_fixed_order(logits)
        is_local = targets[chunk] >= 0
        picked = logits.gather(-1, targets[chunk].where(is_local, 0).unsqueeze(-1)).squeeze(-1)
        target_logit[chunk] = picked.where(is_local, 0)
        del logits  # or they would live until the next chunk's are computed
    return lse, target_logit


def _backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    cut: LogitCut,
    needs: NeededGradients,
) -> tuple[Tensor | None, Tensor | None]:
    order = sort_vocabulary_by_mean_logit(hidden, weight) if cut.filter_eps and len(hidden) else None
    grad_hidden = torch.empty_like(hidden) if needs.hidden else None
    # A bfloat16 sum stops growing once it is 256 times as large as a summand.
    grad_weight = torch.zeros_like(weight, dtype=accumulation_dtype(weight)) if needs.weight else None
    for chunk in split_token_chunks(len(hidden), len(weight), cut):
        chunk_grad_lse = None if grad_lse is None else grad_lse[chunk]
        inputs = hidden[chunk], weight, targets[chunk], lse[chunk], grad[chunk], chunk_grad_lse
        grad_logits = _compute_grad_logits(*inputs, cut, order)
        if grad_hidden is not None:
            torch.mm(grad_logits, weight, out=grad_hidden[chunk])
        if grad_weight is not None:
            grad_weight += grad_logits.T @ hidden[chunk]
        del grad_logits
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _compute_grad_logits(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    cut: LogitCut,
    order: Tensor | None,
) -> Tensor:
    """Return logit gradients (tokens, vocabulary) in the hidden states' dtype."""
    probs = _compute_logits(hidden, weight).sub_(lse.unsqueeze(-1)).exp_()
    is_local = (targets >= 0).to(probs.dtype).unsqueeze(-1)
    indices = targets.clamp(min=0).unsqueeze(-1)
    mask = (
        None if order is None else _compute_active_word_mask(probs, indices, is_local, grad_lse is not None, cut, order)
    )
    result = probs.scatter_add_(1, indices, -is_local).mul_(grad.unsqueeze(-1))
    if grad_lse is not None:
        result.scatter_add_(1, indices, is_local * grad_lse.unsqueeze(-1))
    if mask is not None:
        result.mul_(mask)
    return result.to(hidden.dtype)


def _compute_active_word_mask(
    probs: Tensor, indices: Tensor, is_local: Tensor, uses_lse: bool, cut: LogitCut, order: Tensor
) -> Tensor:
    """Return 1 for words (tokens, vocabulary) in a tile kept by the filter, else 0."""
    size = probs.scatter_add(1, indices, -is_local).abs_()
    if uses_lse:  # a target of probability 1 has no gradient of its loss, but one of its lse
        size = torch.maximum(size, probs)
    return _compute_active_tile_mask(size[:, order], cut)[:, order.argsort()]


def _compute_active_tile_mask(sizes: Tensor, cut: LogitCut) -> Tensor:
    """Return 1 where the tile around a size (tokens, vocabulary) has one not below `filter_eps`, else 0."""
    (tokens, vocab), (height, width) = sizes.shape, cut.tile
    padded = torch.nn.functional.pad(sizes, (0, -vocab % width, 0, -tokens % height))
    tiles = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width).amax((1, 3))
    active = (tiles >= cut.filter_eps).to(sizes.dtype)
    return active.repeat_interleave(height, 0).repeat_interleave(width, 1)[:tokens, :vocab]


def _compute_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return upcast(hidden @ weight.T)


cut_cross_entropy_eager = CutCrossEntropy(_compute_lse_and_target_logit, _backward)


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
    `cut.ignore_index`. Both are differentiable in hidden and weight. Of `cut`, `part` counts, too.
    """
    chunk = max(MIN_CHUNK_TOKENS, MIN_CHUNK_LOGITS // len(weight))
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
        log_probs, lse = _compute_log_softmax_and_lse(hidden, weight)
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
        grads = compute_logit_grad_factors(grad_losses, grad_lse, learned, accumulation_dtype(hidden))
        targets = targets.where(learned, 0)  # any index will do, as the factors there are 0
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        grad_logits = _compute_grad_logits_from_log_probs(log_probs, targets, *grads).to(hidden.dtype)
        grad_hidden = grad_logits @ weight if needs_hidden else None
        grad_weight = ctx.weight_gradient(_weight_gradient, grad_logits, hidden.detach()) if needs_weight else None
        return grad_hidden, grad_weight, None, None, None


_weight_gradient = MatrixProduct(lambda grad_logits, hidden: (grad_logits.T, hidden))


def _compute_log_softmax_and_lse(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits' log softmax (tokens, vocabulary) and their log-sum-exp (tokens,)."""
    logits = hidden @ weight.T
    log_probs = F.log_softmax(logits, dim=-1, dtype=accumulation_dtype(hidden))
    # log p = logit - lse for every word; at the largest logit the difference rounds least.
    return log_probs, logits.amax(-1) - log_probs.amax(-1)


def _compute_grad_logits_from_log_probs(
    log_probs: Tensor, targets: Tensor, grad: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """
    Return softmax * grad - onehot * (grad - grad_lse), with the factors that `compute_logit_grad_factors` returns.
    """
    on_target = grad if grad_lse is None else grad - grad_lse
    result = log_probs.exp().mul_(grad.unsqueeze(-1))
    return result.scatter_add_(1, targets.unsqueeze(-1), -on_target.unsqueeze(-1))
