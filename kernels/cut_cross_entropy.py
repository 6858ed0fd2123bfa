"""
Cross entropy of a linear layer's logits, cut into tiles that are computed twice and never kept.

Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009. The forward pass keeps the
log-sum-exp of the logits by token. The backward pass computes the logits' gradients again, some tokens at a time. With
`filter_eps` it leaves out tiles in which none of these is as large; for that, the words of the vocabulary are first
sorted by their mean logits, so that improbable ones share tiles.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.deferred_grads import WeightGradient, deferring, weight_gradient_of
from drawloom.kernels.linear_cross_entropy import skip_unused_grads, split_grads, weighted
from drawloom.kernels.operation import accumulation_dtype, once_differentiable
from drawloom.kernels.vocab_parallel import SplitVocabulary, all_gather_lse, all_reduce, local_targets


@dataclass(frozen=True)
class LogitCut:
    """
    How logits are cut.

    Tiles whose every probability, less 1 at the target, is below `filter_eps` are left out of the gradients (0: none
    is). `tile` is in tokens and words of the vocabulary; at most `max_logits` gradients of logits exist together. With
    `part`, the weight holds some words of the vocabulary, and ranks of the part's group the others.
    """

    ignore_index: int = -100
    filter_eps: float = 0.0
    tile: tuple[int, int] = (128, 256)
    max_logits: int = 2**28
    part: SplitVocabulary | None = None


EXACT = LogitCut()
"""Not filtered."""


class Needs(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool


class CutCrossEntropyImplementation(NamedTuple):
    """
    The two passes, over hidden (tokens, width), weight (vocabulary, width) and targets (tokens,), -1 where not here.

    `forward` gives float32 log-sum-exp of the logits and the target's logit by token, 0 where it is not here.
    `backward` takes the lse of the whole vocabulary and the two factors of `split_grads`, and gives the gradients that
    are needed.
    """

    forward: Callable[[Tensor, Tensor, Tensor, LogitCut], tuple[Tensor, Tensor]]
    backward: Callable[
        [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None, LogitCut, Needs], tuple[Tensor | None, Tensor | None]
    ]


def cut_cross_entropy_eager(
    hidden: Tensor, weight: Tensor, targets: Tensor, cut: LogitCut = EXACT, token_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """
    Each token's loss, -log softmax(hidden @ weight.T)[target], and the log-sum-exp of its logits.

    hidden (..., width) and weight (vocabulary, width) of one dtype, targets int64 (...), token_weights float32 (...) by
    which losses are multiplied. Losses and lse are (...), at least float32; a loss is 0 where the target is
    `cut.ignore_index`. Both are differentiable in hidden and weight.
    """
    return cross_entropy(EAGER, hidden, weight, targets, cut, token_weights)


def cross_entropy(
    implementation: CutCrossEntropyImplementation,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    cut: LogitCut,
    token_weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`cut_cross_entropy_eager` by any implementation: hidden (..., width), weight (vocabulary, width); same dtypes."""
    tokens, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    weight_gradient = weight_gradient_of(weight)
    losses, lse = _CutCrossEntropy.apply(tokens, weight, flat, cut, implementation, weight_gradient)  # type: ignore[no-untyped-call]
    return weighted(losses.reshape(targets.shape), token_weights), lse.reshape(targets.shape)


@deferring
class _CutCrossEntropy(Function):
    """hidden (tokens, width), weight (vocabulary, width), targets (tokens,); saves these and one number by token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        cut: LogitCut,
        implementation: CutCrossEntropyImplementation,
        weight_gradient: WeightGradient,
    ) -> tuple[Tensor, Tensor]:
        """The loss and the log-sum-exp of each token, both (tokens,), at least float32."""
        local = local_targets(targets, len(weight), cut.ignore_index, cut.part)
        lse, target_logit = all_gather_lse(*implementation.forward(hidden, weight, local, cut), cut.part)
        ctx.save_for_backward(hidden, weight, targets, lse)
        ctx.cut, ctx.implementation, ctx.weight_gradient = cut, implementation, weight_gradient
        skip_unused_grads(ctx)
        return (lse - target_logit).where(targets != cut.ignore_index, 0), lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_losses: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, lse = ctx.saved_tensors
        grad, grad_lse = split_grads(grad_losses, grad_lse, targets != ctx.cut.ignore_index, lse.dtype)
        local = local_targets(targets, len(weight), ctx.cut.ignore_index, ctx.cut.part)
        needs, inputs = Needs(*ctx.needs_input_grad[:2]), (hidden, weight, local, lse, grad)
        # Only the weight's part can wait; it computes the logits a third time, in exchange for keeping none.
        if needs.weight and getattr(ctx.weight_gradient, "active", False):
            of_lse = () if grad_lse is None else (grad_lse,)
            ctx.weight_gradient(_DeferredWeightGradient(ctx.implementation, ctx.cut), *inputs, *of_lse)
            needs = Needs(needs.hidden, False)
        grad_hidden, grad_weight = ctx.implementation.backward(*inputs, grad_lse, ctx.cut, needs)
        if grad_hidden is not None:
            grad_hidden = all_reduce(grad_hidden, ctx.cut.part)
        return grad_hidden, grad_weight, None, None, None, None


@dataclass(frozen=True)
class _DeferredWeightGradient:
    """Computes a weight's gradient that was deferred, from what `Implementation.backward` takes."""

    implementation: CutCrossEntropyImplementation
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
        _, grad_weight = self.implementation.backward(*inputs, self.cut, Needs(False, True))
        return grad_weight  # type: ignore[return-value]


def chunks(tokens: int, vocab: int, cut: LogitCut) -> Iterator[slice]:
    """Whole tiles of tokens, as many as may exist together."""
    size = max(1, cut.max_logits // (vocab * cut.tile[0])) * cut.tile[0]
    return (slice(start, start + size) for start in range(0, tokens, size))


def order_of_vocab(hidden: Tensor, weight: Tensor) -> Tensor:
    """
    The words of the vocabulary, int64 (vocabulary,), from the least to the greatest mean logit over the tokens.

    hidden (tokens, width), weight (vocabulary, width). The mean logit is that of the mean hidden state.
    """
    # The mean of many bfloat16 numbers would be too coarse to sort by.
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (weight.to(wide) @ hidden.to(wide).mean(0)).argsort()


def _forward(hidden: Tensor, weight: Tensor, targets: Tensor, cut: LogitCut) -> tuple[Tensor, Tensor]:
    lse = hidden.new_empty(len(hidden), dtype=accumulation_dtype(hidden))
    target_logit = torch.zeros_like(lse)
    for chunk in chunks(len(hidden), len(weight), cut):
        logits = _logits(hidden[chunk], weight)
        lse[chunk] = logits.logsumexp(-1)
        here = targets[chunk] >= 0
        picked = logits.gather(-1, targets[chunk].where(here, 0).unsqueeze(-1)).squeeze(-1)
        target_logit[chunk] = picked.where(here, 0)
    return lse, target_logit


def _backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    cut: LogitCut,
    needs: Needs,
) -> tuple[Tensor | None, Tensor | None]:
    order = order_of_vocab(hidden, weight) if cut.filter_eps and len(hidden) else None
    grad_hidden = torch.empty_like(hidden) if needs.hidden else None
    grad_weight = torch.zeros_like(weight, dtype=accumulation_dtype(weight)) if needs.weight else None
    for chunk in chunks(len(hidden), len(weight), cut):
        of_lse = None if grad_lse is None else grad_lse[chunk]
        inputs = hidden[chunk], weight, targets[chunk], lse[chunk], grad[chunk], of_lse
        grad_logits = _grad_logits(*inputs, cut, order)
        if grad_hidden is not None:
            grad_hidden[chunk] = grad_logits @ weight
        if grad_weight is not None:
            grad_weight += grad_logits.T @ hidden[chunk]
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _grad_logits(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    cut: LogitCut,
    order: Tensor | None,
) -> Tensor:
    """The gradients of logits (tokens, vocabulary), in the dtype of the hidden states."""
    logits = _logits(hidden, weight)
    probs = (logits - lse.unsqueeze(-1)).exp()
    here = (targets >= 0).to(probs.dtype).unsqueeze(-1)
    places = targets.clamp(min=0).unsqueeze(-1)
    result = probs.scatter_add(1, places, -here)
    # A target of probability 1 has no gradient of its loss, but one of its lse.
    size = result.abs() if grad_lse is None else torch.maximum(result.abs(), probs)
    result = result * grad.unsqueeze(-1)
    if grad_lse is not None:
        result.scatter_add_(1, places, here * grad_lse.unsqueeze(-1))
    if order is not None:
        result = result * _active_tiles(size[:, order], cut)[:, order.argsort()]
    return result.to(hidden.dtype)


def _active_tiles(sizes: Tensor, cut: LogitCut) -> Tensor:
    """1 where a size (tokens, vocabulary) is in a tile in which any is at least `filter_eps`, else 0."""
    (tokens, vocab), (height, width) = sizes.shape, cut.tile
    padded = torch.nn.functional.pad(sizes, (0, -vocab % width, 0, -tokens % height))
    tiles = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width).amax((1, 3))
    active = (tiles >= cut.filter_eps).to(sizes.dtype)
    return active.repeat_interleave(height, 0).repeat_interleave(width, 1)[:tokens, :vocab]


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return (hidden @ weight.T).to(accumulation_dtype(hidden))


EAGER = CutCrossEntropyImplementation(_forward, _backward)
