"""
Cross entropy on a linear layer's logits, cut into tiles, which are computed twice and never kept.

Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009. The forward pass keeps the
tokens' log-sum-exp. The backward pass computes logit gradients again, some tokens at a time. With `filter_eps` it skips
tiles in which all gradients are small; to this end the vocabulary's words are first sorted by their mean logits, so
that improbable words share tiles.

Vocabulary-parallel cross entropy: every rank computes with its rows of the output weight; one exchange joins them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.cross_entropy.logsumexp import logsumexp_in_fixed_order
from drawloom.kernels.cross_entropy.options import EXACT, LogitCut, SplitVocabulary
from drawloom.kernels.cross_entropy.token_losses import (
    compute_logit_grad_factors,
    pass_none_for_unused_grads,
    reshape_and_weight_losses,
)
from drawloom.kernels.deferred_grads import (
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
        computed = compute_cut_gradients(ctx, hidden, weight, targets, lse, grad_losses, grad_lse)
        return *computed, None, None, None, None


def compute_cut_gradients(
    ctx: Any,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad_losses: Tensor | None,
    grad_lse: Tensor | None,
) -> tuple[Tensor | None, Tensor | None]:
    """
    Return the needed gradients of hidden states and weight, from recomputed logits; all other tensors are (tokens,).

    `ctx` has the function's `cut`, `implementation` and `weight_gradient`.
    """
    grad, grad_lse = compute_logit_grad_factors(grad_losses, grad_lse, targets != ctx.cut.ignore_index, lse.dtype)
    local = find_local_target_rows(targets, len(weight), ctx.cut.ignore_index, ctx.cut.part)
    needs, inputs = NeededGradients(*ctx.needs_input_grad[:2]), (hidden, weight, local, lse, grad)
    # A deferred weight gradient computes the logits a third time, in exchange for keeping none.
    if needs.weight and getattr(ctx.weight_gradient, "active", False):
        optional = () if grad_lse is None else (grad_lse,)
        ctx.weight_gradient(RecomputedWeightGradient(ctx.implementation, ctx.cut), *inputs, *optional)
        needs = NeededGradients(needs.hidden, False)
    grad_hidden, grad_weight = ctx.implementation.backward(*inputs, grad_lse, ctx.cut, needs)
    if grad_hidden is not None:
        grad_hidden = all_reduce_gradient(grad_hidden, ctx.cut.part)
    return grad_hidden, grad_weight


@dataclass(frozen=True)
class RecomputedWeightGradient:
    """Function for the weight's gradient by an implementation, given the arguments of its `backward`."""

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
