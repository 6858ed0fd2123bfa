"""
Cut cross entropy in Triton: logits are computed in tiles in registers, and never written.

The backward pass writes the logits' gradients of some tokens at a time. Without filtering, they go through torch's
matrix products; with it, through products over the tiles that are left. The weight's gradient is summed in float32.
"""

import torch
import triton
from torch import Tensor

from drawloom.kernels.cut_cross_entropy import (
    EXACT,
    Cut,
    Implementation,
    Needs,
    Reduction,
    chunks,
    cross_entropy,
    order_of_vocab,
)
from drawloom.kernels.operation import register_kernel
from drawloom.kernels.triton import cut_cross_entropy_kernels as kernels
from drawloom.kernels.triton.primitives import addmm_fp32, check_floats, contiguous_last_dim

TILE = (128, 256)
"""Tokens and words in a tile, where no filter sets other bounds."""

STEP, CHANNELS = 64, 128
"""Channels of hidden states in one step of a tile of logits, and in a tile of their gradients."""

WARPS = 8


def cut_cross_entropy_triton(
    hidden: Tensor, weight: Tensor, targets: Tensor, cut: Cut = EXACT, reduction: Reduction = "none"
) -> Tensor:
    """What cut_cross_entropy_eager gives, for float32, bfloat16 and float16; NaN for a target that does not exist."""
    check_floats("cut_cross_entropy_triton", hidden, weight)
    return cross_entropy(TRITON, hidden, weight, targets, cut, reduction)


def _like_totals(
    hidden: Tensor, weight: Tensor, targets: Tensor, soft_cap: float | None, tokens: int, words: int
) -> tuple[Tensor, Tensor]:
    totals = hidden.new_empty(len(hidden), dtype=torch.float32)
    return totals, torch.empty_like(totals)


@register_kernel(
    "cut_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, float? soft_cap, int tokens, int words)"
    " -> (Tensor, Tensor)",
    fake=_like_totals,
)
def _totals(
    hidden: Tensor, weight: Tensor, targets: Tensor, soft_cap: float | None, tokens: int, words: int
) -> tuple[Tensor, Tensor]:
    hidden, weight, targets = contiguous_last_dim(hidden), contiguous_last_dim(weight), targets.contiguous()
    totals = hidden.new_empty(triton.cdiv(len(weight), words), len(hidden), dtype=torch.float32)
    chosen = torch.where(targets < 0, 0.0, torch.nan)
    if totals.numel():
        kernels.totals_kernel[(triton.cdiv(len(hidden), tokens) * len(totals),)](
            hidden,
            weight,
            targets,
            totals,
            chosen,
            *(len(hidden), *weight.shape),
            *(hidden.stride(0), weight.stride(0)),
            soft_cap,
            TOKENS=tokens,
            WORDS=words,
            STEP=STEP,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
    return totals.logsumexp(0), chosen


def _like_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    totals: Tensor,
    grad: Tensor,
    soft_cap: float | None,
    least: float,
    tokens: int,
    words: int,
    at_once: int,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden states and weight, empty where they are not wanted."""
    grad_hidden = hidden.new_empty(hidden.shape if wants_hidden else 0)
    return grad_hidden, weight.new_empty(weight.shape if wants_weight else 0)


@register_kernel(
    "cut_cross_entropy_backward(Tensor hidden, Tensor weight, Tensor targets, Tensor totals, Tensor grad, "
    "float? soft_cap, float least, int tokens, int words, int at_once, bool wants_hidden, bool wants_weight)"
    " -> (Tensor, Tensor)",
    fake=_like_gradients,
)
def _gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    totals: Tensor,
    grad: Tensor,
    soft_cap: float | None,
    least: float,
    tokens: int,
    words: int,
    at_once: int,
    wants_hidden: bool,
    wants_weight: bool,
) -> tuple[Tensor, Tensor]:
    cut = Cut(soft_cap=soft_cap, filter_eps=least, tile=(tokens, words), at_once=at_once)
    hidden, weight = contiguous_last_dim(hidden), contiguous_last_dim(weight)
    grad_hidden = hidden.new_empty(hidden.shape if wants_hidden else 0)
    summed = weight.new_zeros(weight.shape if wants_weight else 0, dtype=torch.float32)
    order = order_of_vocab(hidden, weight) if least and len(hidden) else None
    for chunk in chunks(len(hidden), len(weight), cut):
        part = hidden[chunk]
        slopes, live = _grad_logits(part, weight, targets[chunk], totals[chunk], grad[chunk], cut, order)
        if order is not None:
            if wants_hidden:
                _sparse_grad_hidden(slopes, live, weight, order, grad_hidden[chunk], cut)
            if wants_weight:
                _sparse_grad_weight(slopes, live, part, order, summed, cut)
            continue
        if wants_hidden:
            torch.mm(slopes, weight, out=grad_hidden[chunk])
        if wants_weight:
            addmm_fp32(summed, slopes.T, part)
    return grad_hidden, summed.to(weight.dtype)


def _grad_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, totals: Tensor, grad: Tensor, cut: Cut, order: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of logits, words in the order that is given, and which tiles (of tokens, of words) are written."""
    (tokens, width), (height, across) = hidden.shape, cut.tile
    # Rows begin where wide reads may.
    slopes = hidden.new_empty(tokens, triton.cdiv(len(weight), across) * across)[:, : len(weight)]
    tiles = triton.cdiv(tokens, height), triton.cdiv(len(weight), across)
    live = torch.ones(tiles, dtype=torch.int8, device=hidden.device)
    kernels.grad_logits_kernel[(live.numel(),)](
        hidden,
        weight,
        order,
        targets.contiguous(),
        totals,
        grad,
        slopes,
        live,
        *(tokens, len(weight), width),
        *(hidden.stride(0), weight.stride(0), slopes.stride(0), grad.stride(0)),
        cut.soft_cap,
        cut.filter_eps,
        TOKENS=height,
        WORDS=across,
        STEP=STEP,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return slopes, live


def _sparse_grad_hidden(slopes: Tensor, live: Tensor, weight: Tensor, order: Tensor, result: Tensor, cut: Cut) -> None:
    kernels.grad_hidden_kernel[(live.shape[0], triton.cdiv(weight.shape[1], CHANNELS))](
        slopes,
        weight,
        order,
        *_lists(live),
        result,
        *(len(slopes), *weight.shape),
        *(slopes.stride(0), weight.stride(0), result.stride(0)),
        TOKENS=cut.tile[0],
        WORDS=cut.tile[1],
        CHANNELS=CHANNELS,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )


def _sparse_grad_weight(slopes: Tensor, live: Tensor, hidden: Tensor, order: Tensor, summed: Tensor, cut: Cut) -> None:
    kernels.grad_weight_kernel[(live.shape[1], triton.cdiv(hidden.shape[1], CHANNELS))](
        slopes,
        hidden,
        order,
        *_lists(live.T.contiguous()),
        summed,
        *(len(slopes), *summed.shape),
        *(slopes.stride(0), hidden.stride(0)),
        TOKENS=cut.tile[0],
        WORDS=cut.tile[1],
        CHANNELS=CHANNELS,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )


def _lists(live: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the columns that live, first and in their order, and how many there are."""
    return live.argsort(dim=1, descending=True, stable=True).to(torch.int32), live.sum(1, dtype=torch.int32)


def _totals_of(hidden: Tensor, weight: Tensor, targets: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    return _totals(hidden, weight, targets, cut.soft_cap, *TILE)  # type: ignore[no-any-return]


def _gradients_of(
    hidden: Tensor, weight: Tensor, targets: Tensor, totals: Tensor, grad: Tensor, cut: Cut, wanted: Needs
) -> tuple[Tensor | None, Tensor | None]:
    inputs = hidden, weight, targets, totals, grad
    tile = cut.tile if cut.filter_eps else TILE
    grad_hidden, grad_weight = _gradients(*inputs, cut.soft_cap, cut.filter_eps, *tile, cut.at_once, *wanted)
    return grad_hidden if wanted.hidden else None, grad_weight if wanted.weight else None


TRITON = Implementation(_totals_of, _gradients_of)
