"""
Cross entropy of a linear layer's logits, as many at a time as may exist together (Triton and torch).

Logits come from torch's matrix product; a kernel turns them into their gradients where they stand, their slopes, and
two more products turn these into gradients of hidden states and weight. That is three products in all, where computing
logits again for the backward pass would make it four.

What the backward pass brings is a factor for each token. Where all slopes can be kept it comes in before the products.
Otherwise some tokens at a time are gone through in the forward pass, and a factor that all tokens have, as in a sum of
losses, scales the gradients that are there; if there is no such factor, the weight's gradient is computed from scratch.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.kernels.cut_cross_entropy import EXACT, Needs
from drawloom.kernels.deferred_grads import WeightGradient, deferring, weight_gradient_of
from drawloom.kernels.operation import register_kernel
from drawloom.kernels.triton.cut_cross_entropy import TRITON
from drawloom.kernels.triton.primitives import addmm_fp32, check_floats, next_power_of_2
from drawloom.kernels.vocab_parallel import local_targets

AT_ONCE = 5 * 2**28
"""Logits that exist together: 2.5 GiB of bfloat16, which is 8192 tokens by 160 thousand words."""

TINY = torch.finfo(torch.float32).tiny

MULTIPLE = 128
"""Chunks are whole tiles of torch's matrix products."""

BLOCK, DEPTH = 4096, 2
"""Logits that a program takes side by side, 8 a thread, and how often before it looks for a new maximum."""


def linear_cross_entropy_triton(hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int = -100) -> Tensor:
    """What linear_cross_entropy_eager gives, for float32, bfloat16, float16; NaN for a target that does not exist."""
    check_floats("linear_cross_entropy_triton", hidden, weight)
    tokens, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    function = _AtOnce if len(tokens) * len(weight) <= AT_ONCE else _InChunks
    later, learns = weight_gradient_of(weight), torch.is_grad_enabled()
    losses: Tensor = function.apply(tokens, weight, flat, ignored, learns, later)  # type: ignore[no-untyped-call]
    return losses.reshape(targets.shape)


@deferring
class _AtOnce(Function):
    """Saves the slopes of all logits, of which each gradient is a product: with factors by token, on its small side."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignored: int,
        learns: bool,
        weight_gradient: WeightGradient,
    ) -> Tensor:
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        losses, slopes = _grad_logits(hidden, weight, targets, ignored, learns and (needs_hidden or needs_weight))
        ctx.save_for_backward(hidden if needs_weight else None, weight if needs_hidden else None, targets, slopes)
        ctx.ignored, ctx.weight_gradient = ignored, weight_gradient
        return losses  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, slopes = ctx.saved_tensors
        grad = grad.where(targets != ctx.ignored, 0).unsqueeze(-1)
        grad_hidden = None if weight is None else ((slopes @ weight) * grad).to(slopes.dtype)
        grad_weight = None if hidden is None else ctx.weight_gradient(_of_weight, slopes, hidden.detach(), grad)
        return grad_hidden, grad_weight, None, None, None, None


def _of_weight(slopes: Tensor, hidden: Tensor, grad: Tensor) -> Tensor:
    """slopes.T @ (hidden * grad), where grad (tokens, 1) may be too small for a product in float16."""
    if slopes.dtype != torch.float16:
        return slopes.T @ (hidden * grad).to(slopes.dtype)
    largest = grad.abs().amax().clamp_min(TINY) if len(grad) else grad.sum()
    product = slopes.T @ (hidden * (grad / largest)).to(slopes.dtype)
    return (product.float() * largest).to(slopes.dtype)


@deferring
class _InChunks(Function):
    """Saves the gradients of the sum of losses, and what a weight's gradient is computed from if that does not do."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignored: int,
        learns: bool,
        weight_gradient: WeightGradient,
    ) -> Tensor:
        wanted = [learns and needs for needs in ctx.needs_input_grad[:2]]
        losses, totals, grad_hidden, grad_weight = _forward(hidden, weight, targets, ignored, *wanted, AT_ONCE)
        ctx.save_for_backward(hidden, weight, targets, totals, grad_hidden, grad_weight)
        ctx.ignored, ctx.weight_gradient = ignored, weight_gradient
        return losses  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, totals, of_hidden, of_weight = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        uniform = not grad.numel() or grad.stride(0) == 0 or grad.numel() == 1
        finite = grad.where(targets != ctx.ignored, 0)
        grad_hidden = (of_hidden * finite.unsqueeze(-1)).to(hidden.dtype) if wants_hidden else None
        if not wants_weight:
            return grad_hidden, None, None, None, None, None
        later = ctx.weight_gradient
        if uniform:
            grad_weight = later(_scaled, of_weight, grad[:1], weight)
        else:
            own = local_targets(targets, len(weight), ctx.ignored, None)
            grad_weight = later(_from_scratch, hidden, weight, own, totals, finite)
        return grad_hidden, grad_weight, None, None, None, None


def _scaled(of_weight: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
    """Without tokens there is no factor, and the gradient is zero."""
    return (of_weight * factor if len(factor) else of_weight).to(weight.dtype)


def _from_scratch(hidden: Tensor, weight: Tensor, own: Tensor, totals: Tensor, grad: Tensor) -> Tensor:
    _, grad_weight = TRITON.gradients(hidden, weight, own, totals, grad, EXACT, Needs(False, True))
    return grad_weight  # type: ignore[return-value]


def _fake_grad_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, wanted: bool
) -> tuple[Tensor, Tensor]:
    """Losses by token, and the gradients of their sum by logit, empty if not wanted."""
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    return losses, hidden.new_empty((len(hidden), len(weight)) if wanted else 0)


@register_kernel(
    "linear_cross_entropy_slopes(Tensor hidden, Tensor weight, Tensor targets, int ignored, bool wanted)"
    " -> (Tensor, Tensor)",
    fake=_fake_grad_logits,
)
def _grad_logits(hidden: Tensor, weight: Tensor, targets: Tensor, ignored: int, wanted: bool) -> tuple[Tensor, Tensor]:
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    logits = hidden @ weight.T
    _lose(logits, targets, losses, torch.empty_like(losses), ignored, wanted)
    return losses, logits if wanted else hidden.new_empty(0)


def _like_forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignored: int,
    wants_hidden: bool,
    wants_weight: bool,
    at_once: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses and log sum exp(logits) by token, and the gradients of the losses' sum, empty where not wanted."""
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    grad_hidden = hidden.new_empty(hidden.shape if wants_hidden else 0)
    grad_weight = weight.new_empty(weight.shape if wants_weight else 0, dtype=torch.float32)
    return losses, torch.empty_like(losses), grad_hidden, grad_weight


@register_kernel(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, int ignored, bool wants_hidden, "
    "bool wants_weight, int at_once) -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_like_forward,
)
def _forward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignored: int,
    wants_hidden: bool,
    wants_weight: bool,
    at_once: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = _like_forward(hidden, weight, targets, ignored, wants_hidden, wants_weight, at_once)
    losses, totals, grad_hidden, grad_weight = results
    grad_weight.zero_()
    for chunk in _chunks(len(hidden), len(weight), at_once):
        part = hidden[chunk]
        logits = part @ weight.T
        _lose(logits, targets[chunk], losses[chunk], totals[chunk], ignored, wants_hidden or wants_weight)
        if wants_hidden:
            torch.mm(logits, weight, out=grad_hidden[chunk])
        if wants_weight:
            addmm_fp32(grad_weight, logits.T, part)
        del logits  # or they would live until the next chunk's are there
    return results


def _chunks(tokens: int, words: int, at_once: int) -> Iterator[slice]:
    """Parts of nearly equal size, each at most what may exist together or a multiple of tokens."""
    most = max(1, at_once // (words * MULTIPLE)) * MULTIPLE
    parts = max(1, -(-tokens // most))
    size = max(1, -(-tokens // parts // MULTIPLE)) * MULTIPLE
    return (slice(start, start + size) for start in range(0, tokens, size))


def _lose(logits: Tensor, targets: Tensor, losses: Tensor, totals: Tensor, ignored: int, learns: bool) -> None:
    """Fill losses and totals; where they learn, the logits become the gradients of their losses."""
    tokens, words = logits.shape
    block = min(BLOCK, next_power_of_2(words))
    if not logits.numel():
        return
    _kernel[(tokens,)](
        logits,
        targets.contiguous(),
        losses,
        totals,
        words,
        logits.stride(0),
        ignored,
        LEARNS=learns,
        BLOCK=block,
        DEPTH=DEPTH,
        num_warps=max(1, block // 256),
        enable_fp_fusion=True,
    )


# fmt: off
@triton.jit(do_not_specialize=["ignored"])
def _kernel(
    logits, targets, losses, totals, words, stride, ignored,
    LEARNS: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + token)
    logits += token * stride
    place = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    greatest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, words, DEPTH * BLOCK):
        inside = start + place < words
        values = tl.load(logits + start + place, mask=inside, other=0.0).to(tl.float32)
        values = tl.where(inside, values, -1e38)  # minus infinity less itself would be NaN
        known, greatest = greatest, tl.maximum(greatest, tl.max(values, 0))
        total = total * tl.exp(known - greatest) + tl.sum(tl.exp(values - greatest[None, :]), 0)
    most = tl.max(greatest, 0)
    total_of_all = most + tl.log(tl.sum(total * tl.exp(greatest - most), 0))
    exists = (target >= 0) & (target < words)
    chosen = tl.load(logits + target, mask=exists, other=0.0).to(tl.float32)
    loss = tl.where(exists, total_of_all - chosen, float("nan"))
    tl.store(losses + token, tl.where(target == ignored, 0.0, loss))
    tl.store(totals + token, total_of_all)
    if not LEARNS:
        return
    # The target's logit is read before any warp writes gradients over it.
    tl.debug_barrier()
    learned = tl.where(target == ignored, 0.0, 1.0)
    for start in range(0, words, DEPTH * BLOCK):
        inside = start + place < words
        values = tl.load(logits + start + place, mask=inside, other=0.0).to(tl.float32)
        slopes = tl.exp(values - total_of_all) - tl.where(start + place == target, 1.0, 0.0)
        tl.store(logits + start + place, (learned * slopes).to(logits.dtype.element_ty), mask=inside)
