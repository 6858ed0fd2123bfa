"""
Cut cross entropy in Triton: logits are computed in tiles in registers, and never written.

The backward pass writes some tokens' logit gradients at a time. Without a filter, torch's matrix products use them;
with a filter, kernels compute products over the remaining tiles, with a sorted copy of the weight. The weight's
gradient is summed in float32. On GPUs with TMA, products in half precision use it.

In float32 all products are torch's, which are several times as fast as Triton's, and use TF32 if torch does. So some
tokens' logits at a time are written in float32.
"""

from typing import Any

import torch
from torch import Tensor

from drawloom.kernels.cut_cross_entropy import (
    CutCrossEntropy,
    LogitCut,
    NeededGradients,
    count_logits_bytes,
    sort_vocabulary_by_mean_logit,
    split_token_chunks,
)
from drawloom.kernels.logsumexp import logsumexp_in_fixed_order
from drawloom.kernels.operation import register_operator
from drawloom.kernels.triton import cut_cross_entropy_kernels as kernels
from drawloom.kernels.triton import tma
from drawloom.kernels.triton.primitives import addmm_fp32, cdiv, check_floats, contiguous_last_dim

FLOAT32_TILE = 32, 256
"""Tokens and words of the vocabulary in a tile of float32, unless a filter uses the caller's tiles."""

STEP, CHANNELS = 64, 128
"""Channels of hidden states in one step of a tile of logits, and in a tile of their gradients."""

WARPS = 8

STAGES = 4
"""Pipeline stages of loops over active tiles; one stage loads the index of the next tile."""


def _count_forward_scratch_bytes(hidden: Tensor, weight: Tensor, max_logits: int) -> int:
    # In other dtypes no logits are written.
    return count_logits_bytes(hidden, weight, max_logits) if _multiplies_by_torch(hidden) else 0


@register_operator(
    "cut_cross_entropy",
    lambda hidden: tuple(hidden.new_empty(len(hidden), dtype=torch.float32) for _ in ("lse", "target_logit")),
    flops=lambda hidden, weight: 2.0 * hidden.numel() * len(weight),
    scratch=_count_forward_scratch_bytes,
)
def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, tokens: int, words: int, max_logits: int
) -> tuple[Tensor, Tensor]:
    hidden, weight, targets = contiguous_last_dim(hidden), contiguous_last_dim(weight), targets.contiguous()
    lse = hidden.new_empty(cdiv(len(weight), words), len(hidden), dtype=torch.float32)
    # A target outside of all tiles keeps its NaN.
    target_logit = torch.where(targets < 0, 0.0, torch.nan)
    if not lse.numel():
        return lse.logsumexp(0), target_logit
    by_torch, cut = _multiplies_by_torch(hidden), LogitCut(tile=(tokens, words), max_logits=max_logits)
    for chunk in split_token_chunks(len(hidden), len(weight), cut) if by_torch else [slice(0, len(hidden))]:
        part = hidden[chunk]
        logits = _compute_padded_logits(part, weight, words) if by_torch else None
        factors, by_tma = _make_matrix_arguments((tokens, STEP), (words, STEP), part, weight)
        kernels.lse_and_target_logit_kernel[(cdiv(len(part), tokens) * len(lse),)](
            logits,
            *factors,
            targets[chunk],
            lse[:, chunk],
            target_logit[chunk],
            *(len(part), *weight.shape),
            *(0 if logits is None else logits.stride(0), part.stride(0), weight.stride(0), lse.stride(0)),
            TOKENS=tokens,
            WORDS=words,
            STEP=STEP,
            TMA=by_tma,
            num_warps=WARPS,
            enable_fp_fusion=True,
        )
        del logits  # or they would live until the next chunk's are computed
    return logsumexp_in_fixed_order(lse.T), target_logit


def _make_matrix_arguments(
    block: tuple[int, int], other: tuple[int, int], *factors: Tensor
) -> tuple[tuple[Any, Any], bool]:
    """Return two matrices as kernel arguments, in blocks with these sizes, and whether they are TMA descriptors."""
    if not all(map(tma.can_copy_blocks_of, factors)) or not tma.is_supported(factors[0].device):
        return factors, False  # type: ignore[return-value]
    return (tma.create_block_descriptor(factors[0], *block), tma.create_block_descriptor(factors[1], *other)), True


def _multiplies_by_torch(hidden: Tensor) -> bool:
    """Return whether torch's product computes logits, and writes them for the kernels."""
    return hidden.dtype == torch.float32


def _compute_padded_logits(hidden: Tensor, weight: Tensor, tile_width: int) -> Tensor:
    """
    Return logits (tokens, vocabulary) for both passes, which must have the same roundings.

    With different roundings, exp(logit - lse) - 1 would be wrong for probabilities near 1.
    """
    return torch.mm(hidden.detach(), weight.detach().T, out=_allocate_padded_logits(hidden, weight, tile_width))


def _allocate_padded_logits(hidden: Tensor, weight: Tensor, tile_width: int) -> Tensor:
    """Return an empty tensor (tokens, vocabulary) whose rows are padded to whole tiles, for aligned 16-byte reads."""
    return hidden.new_empty(len(hidden), cdiv(len(weight), tile_width) * tile_width)[:, : len(weight)]


def _allocate_gradients(
    hidden: Tensor, weight: Tensor, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """Return hidden state and weight gradients, empty if they are not needed."""
    grad_hidden = hidden.new_empty(hidden.shape if needs_hidden else 0)
    return grad_hidden, weight.new_empty(weight.shape if needs_weight else 0)


def count_gradient_flops(hidden: Tensor, weight: Tensor, needs_hidden: bool, needs_weight: bool) -> float:
    """Return the FLOPs for logits and the needed gradients: hidden (tokens, width), weight (vocabulary, width)."""
    return 2.0 * hidden.numel() * len(weight) * (1 + needs_hidden + needs_weight)


def _count_backward_scratch_bytes(
    hidden: Tensor, weight: Tensor, filter_eps: float, max_logits: int, needs_weight: bool
) -> int:
    """Return the bytes for logit gradients, float32 sums, and the sorted copy of the weight."""
    sums = 4 * weight.numel() if needs_weight and weight.dtype != torch.float32 else 0
    return count_logits_bytes(hidden, weight, max_logits) + sums + (weight.nbytes if filter_eps else 0)


@register_operator(
    "cut_cross_entropy_backward",
    _allocate_gradients,
    flops=count_gradient_flops,
    scratch=_count_backward_scratch_bytes,
)
def _backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    filter_eps: float,
    tokens: int,
    words: int,
    max_logits: int,
    needs_hidden: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    cut = LogitCut(filter_eps=filter_eps, tile=(tokens, words), max_logits=max_logits)
    hidden, weight = contiguous_last_dim(hidden), contiguous_last_dim(weight)
    grad_hidden = hidden.new_empty(hidden.shape if needs_hidden else 0)
    grad_weight = weight.new_zeros(weight.shape if needs_weight else 0, dtype=torch.float32)
    is_filtered, ranks = filter_eps > 0 and len(hidden) > 0, None
    if is_filtered:
        # A sorted copy of the weight: kernels that gather its rows take longer than all copies.
        order = sort_vocabulary_by_mean_logit(hidden, weight)
        weight, ranks = weight[order], order.argsort()
        is_word = (targets >= 0) & (targets < len(weight))
        targets = ranks[targets.where(is_word, 0)].where(is_word, -1)
    for chunk in split_token_chunks(len(hidden), len(weight), cut):
        part, part_grad_lse = hidden[chunk], None if grad_lse is None else grad_lse[chunk]
        inputs = part, weight, targets[chunk], lse[chunk], grad[chunk], part_grad_lse
        grad_logits, active = _compute_grad_logits_and_tiles(*inputs, cut)
        if is_filtered and not _multiplies_by_torch(hidden):
            if needs_hidden:
                _write_sparse_grad_hidden(grad_logits, active, weight, grad_hidden[chunk], cut)
            if needs_weight:
                _add_sparse_grad_weight(grad_logits, active, part, grad_weight, cut)
            continue
        if needs_hidden:
            torch.mm(grad_logits, weight, out=grad_hidden[chunk])
        if needs_weight:
            addmm_fp32(grad_weight, grad_logits.T, part)
    grad_weight = grad_weight.to(weight.dtype)
    return grad_hidden, grad_weight if ranks is None or not needs_weight else grad_weight[ranks]


def _compute_grad_logits_and_tiles(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    cut: LogitCut,
) -> tuple[Tensor, Tensor]:
    """Return the logit gradients, and flags for the written tiles (token tiles, word tiles)."""
    (tokens, width), (height, across) = hidden.shape, cut.tile
    by_torch = _multiplies_by_torch(hidden)
    grad_logits = (
        _compute_padded_logits(hidden, weight, across) if by_torch else _allocate_padded_logits(hidden, weight, across)
    )
    tiles = cdiv(tokens, height), cdiv(len(weight), across)
    active = torch.ones(tiles, dtype=torch.int8, device=hidden.device)
    factors, by_tma = _make_matrix_arguments((height, STEP), (across, STEP), hidden, weight)
    kernels.grad_logits_kernel[(active.numel(),)](
        *factors,
        targets.contiguous(),
        lse,
        grad,
        grad_lse,
        grad_logits,
        active,
        *(tokens, len(weight), width),
        *(hidden.stride(0), weight.stride(0), grad_logits.stride(0), grad.stride(0)),
        cut.filter_eps,
        TOKENS=height,
        WORDS=across,
        STEP=STEP,
        TMA=by_tma,
        HAS_LOGITS=by_torch,
        FILTERED=cut.filter_eps > 0,
        num_warps=WARPS,
        enable_fp_fusion=True,
    )
    return grad_logits, active


def _write_sparse_grad_hidden(
    grad_logits: Tensor, active: Tensor, weight: Tensor, result: Tensor, cut: LogitCut
) -> None:
    step = min(STEP, cut.tile[1])
    factors, by_tma = _make_matrix_arguments((cut.tile[0], step), (step, CHANNELS), grad_logits, weight)
    kernels.grad_hidden_kernel[(active.shape[0], cdiv(weight.shape[1], CHANNELS))](
        *factors,
        *_sort_and_count_active_tiles(active),
        result,
        *(len(grad_logits), *weight.shape),
        *(grad_logits.stride(0), weight.stride(0), result.stride(0)),
        TOKENS=cut.tile[0],
        WORDS=cut.tile[1],
        CHANNELS=CHANNELS,
        STEP=step,
        TMA=by_tma,
        num_warps=WARPS,
        num_stages=STAGES,
        enable_fp_fusion=True,
    )


def _add_sparse_grad_weight(grad_logits: Tensor, active: Tensor, hidden: Tensor, result: Tensor, cut: LogitCut) -> None:
    step = min(STEP, cut.tile[0])
    factors, by_tma = _make_matrix_arguments((step, cut.tile[1]), (step, CHANNELS), grad_logits, hidden)
    kernels.add_grad_weight_kernel[(active.shape[1], cdiv(hidden.shape[1], CHANNELS))](
        *factors,
        *_sort_and_count_active_tiles(active.T.contiguous()),
        result,
        *(len(grad_logits), *result.shape),
        *(grad_logits.stride(0), hidden.stride(0)),
        TOKENS=cut.tile[0],
        WORDS=cut.tile[1],
        CHANNELS=CHANNELS,
        STEP=step,
        TMA=by_tma,
        num_warps=WARPS,
        num_stages=STAGES,
        enable_fp_fusion=True,
    )


def _sort_and_count_active_tiles(active: Tensor) -> tuple[Tensor, Tensor]:
    """Return active columns by row in order, and their numbers."""
    return active.argsort(dim=1, descending=True, stable=True).to(torch.int32), active.sum(1, dtype=torch.int32)


def _run_forward(hidden: Tensor, weight: Tensor, targets: Tensor, cut: LogitCut) -> tuple[Tensor, Tensor]:
    check_floats("cut_cross_entropy_triton", hidden, weight)
    return _forward(hidden, weight, targets, *_choose_tile(hidden, cut), cut.max_logits)


def _choose_tile(hidden: Tensor, cut: LogitCut) -> tuple[int, int]:
    """Return the tile for both passes, which must cut tokens into the same chunks."""
    return FLOAT32_TILE if _multiplies_by_torch(hidden) and not cut.filter_eps else cut.tile


def _run_backward(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    lse: Tensor,
    grad: Tensor,
    grad_lse: Tensor | None,
    cut: LogitCut,
    needs: NeededGradients,
) -> tuple[Tensor | None, Tensor | None]:
    inputs = hidden, weight, targets, lse, grad, grad_lse
    grad_hidden, grad_weight = _backward(*inputs, cut.filter_eps, *_choose_tile(hidden, cut), cut.max_logits, *needs)
    return grad_hidden if needs.hidden else None, grad_weight if needs.weight else None


cut_cross_entropy_triton = CutCrossEntropy(_run_forward, _run_backward)
"""
Cut cross entropy for float32, bfloat16 and float16; results are float32. A target outside the vocabulary has the loss
NaN.
"""
