"""
Cross entropy of a linear layer's logits, cut into tiles that are computed twice and never kept.

Wijmans et al. 2024, "Cut Your Losses in Large-Vocabulary Language Models", arXiv 2411.09009. The forward pass keeps the
log of the sum of exp(logits) by token. The backward pass computes the logits' gradients again, some tokens at a time.
With `least` it leaves out tiles in which none of these is as large; for that, tokens of the vocabulary are first put in
the order of their mean logits, so that the improbable ones stand together.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.kernels.deferred_grads import WeightGradient, weight_gradient_of
from drawloom.kernels.vocab_parallel import VocabularyPart, all_gather_lse, all_reduce, local_targets

Reduction = Literal["none", "sum", "mean"]


@dataclass(frozen=True)
class Cut:
    """
    How logits are computed and cut: `soft_cap` makes them soft_cap * tanh(logit / soft_cap).

    Tiles whose every probability, less 1 at the target, is below `least` are left out of the gradients (0: none is).
    `tile` is in tokens and words of the vocabulary; at most `at_once` gradients of logits exist together.
    """

    ignored: int = -100
    soft_cap: float | None = None
    filter_eps: float = 0.0
    tile: tuple[int, int] = (128, 128)
    at_once: int = 2**28
    part: VocabularyPart | None = None


EXACT = Cut()
"""Neither capped nor filtered."""


class Needs(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool


class Implementation(NamedTuple):
    """
    The two passes, over hidden (tokens, width), weight (vocabulary, width) and targets (tokens,), -1 where not here.

    `totals` gives float32 log sum exp(logits) and the target's logit by token, 0 where it is not here. `gradients`
    takes the former over the whole vocabulary, and the gradients of all losses, and gives those that are wanted.
    """

    totals: Callable[[Tensor, Tensor, Tensor, Cut], tuple[Tensor, Tensor]]
    gradients: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Cut, Needs], tuple[Tensor | None, Tensor | None]]


def cut_cross_entropy_eager(
    hidden: Tensor, weight: Tensor, targets: Tensor, cut: Cut = EXACT, reduction: Reduction = "none"
) -> Tensor:
    """
    -log softmax(hidden @ weight.T)[target] by token: hidden (..., width), weight (vocabulary, width), targets (...).

    Gives float32 (...), 0 where the target is ignored; or their sum, or their mean over what is not ignored.
    """
    return cross_entropy(EAGER, hidden, weight, targets, cut, reduction)


def cross_entropy(
    implementation: Implementation, hidden: Tensor, weight: Tensor, targets: Tensor, cut: Cut, reduction: Reduction
) -> Tensor:
    """The same by any implementation."""
    tokens, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    later = weight_gradient_of(weight)
    losses: Tensor = _CutCrossEntropy.apply(tokens, weight, flat, cut, implementation, later)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses.reshape(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / (flat != cut.ignored).sum()


class _CutCrossEntropy(Function):
    """Saves its inputs and one number for each token."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        cut: Cut,
        implementation: Implementation,
        weight_gradient: WeightGradient,
    ) -> Tensor:
        own = local_targets(targets, len(weight), cut.ignored, cut.part)
        totals, chosen = all_gather_lse(*implementation.totals(hidden, weight, own, cut), cut.part)
        ctx.save_for_backward(hidden, weight, targets, totals)
        ctx.cut, ctx.implementation, ctx.weight_gradient = cut, implementation, weight_gradient
        return (totals - chosen).where(targets != cut.ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, totals = ctx.saved_tensors
        grad = grad.where(targets != ctx.cut.ignored, 0)
        own = local_targets(targets, len(weight), ctx.cut.ignored, ctx.cut.part)
        wanted, inputs = Needs(*ctx.needs_input_grad[:2]), (hidden, weight, own, totals, grad)
        if wanted.weight and getattr(ctx.weight_gradient, "active", False):
            ctx.weight_gradient(_Later(ctx.implementation, ctx.cut), *inputs)
            wanted = Needs(wanted.hidden, False)
        grad_hidden, grad_weight = ctx.implementation.gradients(*inputs, ctx.cut, wanted)
        if grad_hidden is not None:
            grad_hidden = all_reduce(grad_hidden, ctx.cut.part)
        return grad_hidden, grad_weight, None, None, None, None


@dataclass(frozen=True)
class _Later:
    """Computes a weight's gradient that was put off."""

    implementation: Implementation
    cut: Cut

    def __call__(self, *inputs: Tensor) -> Tensor:
        _, grad_weight = self.implementation.gradients(*inputs, self.cut, Needs(False, True))  # type: ignore[call-arg, arg-type]
        return grad_weight  # type: ignore[return-value]


def chunks(tokens: int, words: int, cut: Cut) -> Iterator[slice]:
    """Whole tiles of tokens, as many as may exist together."""
    size = max(1, cut.at_once // (words * cut.tile[0])) * cut.tile[0]
    return (slice(start, start + size) for start in range(0, tokens, size))


def order_of_vocab(hidden: Tensor, weight: Tensor) -> Tensor:
    """The words of the vocabulary from the least to the greatest mean logit, which is that of the mean hidden state."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (weight.to(wide) @ hidden.to(wide).mean(0)).argsort()


def _totals(hidden: Tensor, weight: Tensor, targets: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    totals = hidden.new_empty(len(hidden), dtype=_accumulation_dtype(hidden))
    chosen = torch.zeros_like(totals)
    for chunk in chunks(len(hidden), len(weight), cut):
        logits = _logits(hidden[chunk], weight, cut)
        totals[chunk] = logits.logsumexp(-1)
        own = targets[chunk] >= 0
        picked = logits.gather(-1, targets[chunk].where(own, 0).unsqueeze(-1)).squeeze(-1)
        chosen[chunk] = picked.where(own, 0)
    return totals, chosen


def _gradients(
    hidden: Tensor, weight: Tensor, targets: Tensor, totals: Tensor, grad: Tensor, cut: Cut, wanted: Needs
) -> tuple[Tensor | None, Tensor | None]:
    order = order_of_vocab(hidden, weight) if cut.filter_eps and len(hidden) else None
    grad_hidden = torch.empty_like(hidden) if wanted.hidden else None
    grad_weight = torch.zeros_like(weight, dtype=_accumulation_dtype(weight)) if wanted.weight else None
    for chunk in chunks(len(hidden), len(weight), cut):
        slopes = _grad_logits(hidden[chunk], weight, targets[chunk], totals[chunk], grad[chunk], cut, order)
        if grad_hidden is not None:
            grad_hidden[chunk] = slopes @ weight
        if grad_weight is not None:
            grad_weight += slopes.T @ hidden[chunk]
    return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype)


def _grad_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, totals: Tensor, grad: Tensor, cut: Cut, order: Tensor | None
) -> Tensor:
    """The gradients of logits (tokens, vocabulary), in the dtype of the hidden states."""
    logits = _logits(hidden, weight, cut)
    slopes = (logits - totals.unsqueeze(-1)).exp()
    own = targets >= 0
    slopes.scatter_add_(1, targets.where(own, 0).unsqueeze(-1), -own.to(slopes.dtype).unsqueeze(-1))
    if order is not None:
        slopes = slopes * _active_tiles(slopes[:, order], cut)[:, order.argsort()]
    slopes = slopes * grad.unsqueeze(-1)
    if cut.soft_cap is not None:
        slopes = slopes * (1 - (logits / cut.soft_cap).square())
    return slopes.to(hidden.dtype)


def _active_tiles(slopes: Tensor, cut: Cut) -> Tensor:
    """1 where a slope is in a tile in which any is as large as the least that counts, else 0."""
    (tokens, words), (height, width) = slopes.shape, cut.tile
    padded = torch.nn.functional.pad(slopes, (0, -words % width, 0, -tokens % height))
    tiles = padded.abs().view(padded.shape[0] // height, height, padded.shape[1] // width, width).amax((1, 3))
    live = (tiles >= cut.filter_eps).to(slopes.dtype)
    return live.repeat_interleave(height, 0).repeat_interleave(width, 1)[:tokens, :words]


def _logits(hidden: Tensor, weight: Tensor, cut: Cut) -> Tensor:
    logits = (hidden @ weight.T).to(_accumulation_dtype(hidden))
    return logits if cut.soft_cap is None else (logits / cut.soft_cap).tanh() * cut.soft_cap


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


EAGER = Implementation(_totals, _gradients)
