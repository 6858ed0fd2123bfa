"""
Cut cross entropy kernels: logit tiles, and products with tiles of their gradients.

A tile is `TOKENS` by `WORDS`. It is computed over the hidden states' width in steps, or read if torch wrote logits;
sums are in float32. Concurrent programs process the tokens for one word tile, so the weight is read once and the few
hidden states come from the cache. A program writes its own elements: there are no locks and no atomic additions. With
`TMA`, factors are tensor descriptors with the product's blocks.

Cut cross entropy in Triton: logits are computed in tiles in registers, and never written.

The backward pass writes some tokens' logit gradients at a time. Without a filter, torch's matrix products use them;
with a filter, kernels compute products over the remaining tiles, with a sorted copy of the weight. The weight's
gradient is summed in float32. On GPUs with TMA, products in half precision use it.

In float32 all products are torch's, which are several times as fast as Triton's, and use TF32 if torch does. So some
tokens' logits at a time are written in float32.

Cross entropy for a linear layer's logits, with as many logits at a time as may exist together (Triton and torch).

torch's matrix product computes logits, a kernel overwrites them with their gradients, and two more products turn these
into the hidden states' and the weight's gradients. There are three products in all; computing logits again for the
backward pass would make it four.

The backward pass adds a factor for each token. If all logits' gradients fit, the factors are applied before the
products. Otherwise the forward pass computes both gradients for some tokens at a time, times the tokens' weights. A
factor that all tokens share, as in a sum of losses, then scales these gradients; with other factors, or if a loss
depends on lse, the gradients are computed from scratch.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from triton.language import constexpr

from drawloom.kernels.cross_entropy.cut import (
    CutCrossEntropy,
    NeededGradients,
    RecomputedWeightGradient,
    compute_cut_gradients,
    count_logits_bytes,
    find_local_target_rows,
    sort_vocabulary_by_mean_logit,
    split_token_chunks,
)
from drawloom.kernels.cross_entropy.logsumexp import logsumexp_in_fixed_order
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
from drawloom.kernels.operation import once_differentiable, register_kernel, register_operator
from drawloom.kernels.results import TokenLosses
from drawloom.kernels.triton import tma
from drawloom.kernels.triton.primitives import (
    addmm_fp32,
    cache_launches,
    cdiv,
    check_floats,
    contiguous_last_dim,
    load_float32,
    load_or_zero,
    mask_tile,
    next_power_of_2,
)

# fmt: off


@triton.jit
def _load_block(
    x, first_row, first_column, rows, columns, stride, ROWS: constexpr, COLUMNS: constexpr, TMA: constexpr,
):
    """Load a matrix block, zero beyond the ends, by its descriptor or by its address."""
    if TMA:
        return x.load([first_row, first_column])
    else:
        row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
        inside = mask_tile(row < rows, column < columns)
        return load_or_zero(x + row.to(tl.int64)[:, None] * stride + column[None, :], inside)


@triton.jit
def _get_logit_tile(
    logits, hidden, weight, token, word, width, tokens, words, logits_stride, hidden_stride, weight_stride,
    TOKENS: constexpr, WORDS: constexpr, STEP: constexpr, TMA: constexpr,
):
    """Return the logit tile that begins at a token and a word: read it, or compute hidden @ weight.T."""
    if logits is not None:
        total = _load_block(logits, token, word, tokens, words, logits_stride, TOKENS, WORDS, False)
    else:
        total = tl.zeros((TOKENS, WORDS), tl.float32)
        for channel in range(0, width, STEP):
            a = _load_block(hidden, token, channel, tokens, width, hidden_stride, TOKENS, STEP, TMA)
            b = _load_block(weight, word, channel, words, width, weight_stride, WORDS, STEP, TMA)
            total = tl.dot(a, b.T, total)
    return total


@cache_launches("tokens")
def lse_and_target_logit_kernel(
    logits, hidden, weight, targets, lse, target_logit, tokens, words, width,
    logits_stride, hidden_stride, weight_stride, lse_stride,
    TOKENS: constexpr, WORDS: constexpr, STEP: constexpr, TMA: constexpr,
):
    """Store log sum exp(logits) by token and word tile, and the targets' logits."""
    across = tl.cdiv(tokens, TOKENS)
    first = (tl.program_id(0) % across) * TOKENS
    tile = tl.program_id(0) // across
    token, word = first + tl.arange(0, TOKENS), tile * WORDS + tl.arange(0, WORDS)
    values = _get_logit_tile(
        logits, hidden, weight, first, tile * WORDS, width, tokens, words, logits_stride, hidden_stride, weight_stride,
        TOKENS, WORDS, STEP, TMA,
    )
    values = tl.where((word < words)[None, :], values, -float("inf"))
    largest = tl.max(values, 1)
    total = largest + tl.log(tl.sum(tl.exp(values - largest[:, None]), 1))
    tl.store(lse + tile.to(tl.int64) * lse_stride + token, total, mask=token < tokens)
    target = tl.load(targets + token, mask=token < tokens, other=-1)
    logit = tl.sum(tl.where(word[None, :] == target[:, None], values, 0.0), 1)
    # Each target is in one tile, so no two programs write the same element.
    is_in_tile = (target >= tile * WORDS) & (target < tl.minimum((tile + 1) * WORDS, words))
    tl.store(target_logit + token, logit, mask=is_in_tile)


@cache_launches("tokens")
def grad_logits_kernel(
    hidden, weight, targets, lse, grad, grad_lse, grad_logits, active, tokens, words, width,
    hidden_stride, weight_stride, logits_stride, grad_stride, filter_eps,
    TOKENS: constexpr, WORDS: constexpr, STEP: constexpr, TMA: constexpr, HAS_LOGITS: constexpr,
    FILTERED: constexpr,
):
    """
    Store logit gradients, and flags for the tiles kept by the filter; other tiles are not written.

    If `grad_logits` has logits (`HAS_LOGITS`), their gradients overwrite them, with 0 in skipped tiles.
    """
    across = tl.cdiv(tokens, TOKENS)
    down = tl.program_id(0) % across
    tile = tl.program_id(0) // across
    token, word = down * TOKENS + tl.arange(0, TOKENS), tile * WORDS + tl.arange(0, WORDS)
    logits = _get_logit_tile(
        grad_logits if HAS_LOGITS else None, hidden, weight, down * TOKENS, tile * WORDS, width, tokens, words,
        logits_stride, hidden_stride, weight_stride, TOKENS, WORDS, STEP, TMA,
    )
    inside = mask_tile(token < tokens, word < words)
    total = load_or_zero(lse + token, token < tokens)
    target = tl.load(targets + token, mask=token < tokens, other=-1)
    onehot = tl.where(word[None, :] == target[:, None], 1.0, 0.0)
    probs = tl.where(inside, tl.exp(logits - total[:, None]), 0.0)
    values = tl.where(inside, probs - onehot, 0.0)
    is_active = True
    if FILTERED:
        size = tl.abs(values)
        if grad_lse is not None:  # a target of probability 1 has no gradient of its loss, but one of its lse
            size = tl.maximum(size, probs)
        is_active = tl.max(size) >= filter_eps
        tl.store(active + down * tl.cdiv(words, WORDS) + tile, is_active.to(tl.int8))
    if HAS_LOGITS or is_active:
        factor = load_or_zero(grad + token.to(tl.int64) * grad_stride, token < tokens)
        values *= factor.to(tl.float32)[:, None]
        if grad_lse is not None:
            factor_lse = load_or_zero(grad_lse + token, token < tokens)
            values += onehot * factor_lse.to(tl.float32)[:, None]
        values = tl.where(inside, values, 0.0)
        at = grad_logits + token.to(tl.int64)[:, None] * logits_stride + word[None, :]
        if HAS_LOGITS:
            tl.store(at, tl.where(is_active, values, 0.0), mask=inside)
        else:
            # The padding of a row is written, too: torch's bfloat16 matmul on a CPU reads it, and NaN * 0 is NaN.
            tl.store(at, values, mask=(token < tokens)[:, None])


@cache_launches("tokens")
def grad_hidden_kernel(
    grad_logits, weight, tiles, counts, result, tokens, words, width, logits_stride, weight_stride, result_stride,
    TOKENS: constexpr, WORDS: constexpr, CHANNELS: constexpr, STEP: constexpr, TMA: constexpr,
):
    """Store grad_logits @ weight by token tile, summed over active word tiles in steps."""
    down, left = tl.program_id(0), tl.program_id(1) * CHANNELS
    first = down * TOKENS
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for step in range(0, tl.load(counts + down) * (WORDS // STEP)):
        tile = tl.load(tiles + down * tl.cdiv(words, WORDS) + step // (WORDS // STEP))
        word = tile * WORDS + step % (WORDS // STEP) * STEP
        a = _load_block(grad_logits, first, word, tokens, words, logits_stride, TOKENS, STEP, TMA)
        b = _load_block(weight, word, left, words, width, weight_stride, STEP, CHANNELS, TMA)
        total = tl.dot(a, b, total)
    token, channel = first + tl.arange(0, TOKENS), left + tl.arange(0, CHANNELS)
    at = result + token.to(tl.int64)[:, None] * result_stride + channel[None, :]
    tl.store(at, total, mask=mask_tile(token < tokens, channel < width))


@cache_launches("tokens")
def add_grad_weight_kernel(
    grad_logits, hidden, tiles, counts, result, tokens, words, width, logits_stride, hidden_stride,
    TOKENS: constexpr, WORDS: constexpr, CHANNELS: constexpr, STEP: constexpr, TMA: constexpr,
):
    """Add grad_logits.T @ hidden to the float32 result by word tile, over active token tiles in steps."""
    down, left = tl.program_id(0), tl.program_id(1) * CHANNELS
    count, first = tl.load(counts + down), down * WORDS
    if count == 0:
        return
    word, channel = first + tl.arange(0, WORDS), left + tl.arange(0, CHANNELS)
    inside = mask_tile(word < words, channel < width)
    at = result + word.to(tl.int64)[:, None] * width + channel[None, :]
    total = load_or_zero(at, inside)
    for step in range(0, count * (TOKENS // STEP)):
        tile = tl.load(tiles + down * tl.cdiv(tokens, TOKENS) + step // (TOKENS // STEP))
        token = tile * TOKENS + step % (TOKENS // STEP) * STEP
        a = _load_block(grad_logits, token, first, tokens, words, logits_stride, STEP, WORDS, TMA)
        b = _load_block(hidden, token, left, tokens, width, hidden_stride, STEP, CHANNELS, TMA)
        total = tl.dot(a.T, b, total)
    tl.store(at, total, mask=inside)


FLOAT32_TILE = 32, 256
"""Tokens and vocabulary words in a float32 tile, unless a filter uses the caller's tiles."""

STEP, CHANNELS = 64, 128
"""Hidden channels in one step for a tile with logits, and in a tile with their gradients."""

WARPS = 8

STAGES = 4
"""Pipeline stages for loops over active tiles; one stage loads the index of the next tile."""


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
        lse_and_target_logit_kernel[(cdiv(len(part), tokens) * len(lse),)](
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
    """Return the bytes for logit gradients, float32 sums (unless they are the result), and the sorted weight."""
    sums = 4 * weight.numel() if needs_weight and (filter_eps or weight.dtype != torch.float32) else 0
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
    grad_logits_kernel[(active.numel(),)](
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
    )
    return grad_logits, active


def _write_sparse_grad_hidden(
    grad_logits: Tensor, active: Tensor, weight: Tensor, result: Tensor, cut: LogitCut
) -> None:
    step = min(STEP, cut.tile[1])
    factors, by_tma = _make_matrix_arguments((cut.tile[0], step), (step, CHANNELS), grad_logits, weight)
    grad_hidden_kernel[(active.shape[0], cdiv(weight.shape[1], CHANNELS))](
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
    )


def _add_sparse_grad_weight(grad_logits: Tensor, active: Tensor, hidden: Tensor, result: Tensor, cut: LogitCut) -> None:
    step = min(STEP, cut.tile[0])
    factors, by_tma = _make_matrix_arguments((step, cut.tile[1]), (step, CHANNELS), grad_logits, hidden)
    add_grad_weight_kernel[(active.shape[1], cdiv(hidden.shape[1], CHANNELS))](
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


MAX_LOGITS = 5 * 2**28
"""Limit on logits in memory at once: 2.5 GiB in bfloat16, or 8192 tokens by 160 thousand words."""

TINY = torch.finfo(torch.float32).tiny

MULTIPLE = 128
"""Divisor for a chunk's token count, for whole tiles in torch's matrix products."""

BLOCK, DEPTH = 4096, 2
"""Logits in a block, 8 per thread, and blocks that a program reads before it updates the maximum."""


def linear_cross_entropy_triton(
    hidden: Tensor, weight: Tensor, targets: Tensor, cut: LogitCut = EXACT, token_weights: Tensor | None = None
) -> TokenLosses:
    """
    Compute linear_cross_entropy_eager, float32 (...), for float32, bfloat16 and float16.

    hidden (..., width), weight (vocabulary, width), targets int64 (...), token_weights float32 (...). A target outside
    the vocabulary has a NaN loss.
    """
    check_floats("linear_cross_entropy_triton", hidden, weight)
    tokens, flat = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)
    if cut.part is not None:  # split vocabulary: cut cross entropy exchanges sums
        return cut_cross_entropy_triton(hidden, weight, targets, cut, token_weights)
    arguments = tokens, weight, flat, cut.ignore_index, torch.is_grad_enabled(), get_weight_gradient_function(weight)
    if len(tokens) * len(weight) <= MAX_LOGITS:  # all logits' gradients fit
        return reshape_and_weight_losses(_WholeLogits.apply(*arguments), targets, token_weights)  # type: ignore[no-untyped-call]
    # Gradients are computed in the forward pass, which therefore needs the token weights.
    factors = (flat != cut.ignore_index).to(torch.float32)
    if token_weights is not None:
        factors = factors * token_weights.detach().reshape(-1)
    return reshape_and_weight_losses(_InChunks.apply(*arguments, factors), targets, None)  # type: ignore[no-untyped-call]


@compute_at_once_if_hooked
class _WholeLogits(Function):
    """Cross entropy that keeps all logits' gradients; token factors multiply the small factors in both products."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        wants_gradients: bool,
        weight_gradient: WeightGradient,
    ) -> tuple[Tensor, Tensor]:
        """Return losses and lse, float32 (tokens,), for hidden (tokens, width) and weight (vocabulary, width)."""
        needs_hidden, needs_weight, *_ = ctx.needs_input_grad
        needed = wants_gradients and (needs_hidden or needs_weight)
        losses, lse, grad_logits = _compute_losses_and_grad_logits(hidden, weight, targets, ignore_index, needed)
        ctx.save_for_backward(hidden if needs_weight else None, weight if needs_hidden else None, targets, grad_logits)
        ctx.ignore_index, ctx.weight_gradient, ctx.vocab = ignore_index, weight_gradient, len(weight)
        pass_none_for_unused_grads(ctx)
        return losses, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_losses: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, targets, grad_logits = ctx.saved_tensors
        grad, grad_lse = compute_logit_grad_factors(grad_losses, grad_lse, targets != ctx.ignore_index, torch.float32)
        inputs = [grad.unsqueeze(-1)]
        if grad_lse is not None:
            local = find_local_target_rows(targets, ctx.vocab, ctx.ignore_index, None)
            is_word = (local >= 0) & (local < ctx.vocab)
            inputs += [local.where(is_word, 0), grad_lse.where(is_word, 0).unsqueeze(-1)]
        grad_hidden = None if weight is None else _compute_hidden_gradient(grad_logits, weight, *inputs)
        grad_weight = None
        if hidden is not None:
            is_product = grad_lse is None and hidden.dtype != torch.float16
            compute = _WEIGHT_PRODUCT if is_product else _compute_weight_gradient
            grad_weight = ctx.weight_gradient(compute, grad_logits, hidden.detach(), *inputs)
        return grad_hidden, grad_weight, None, None, None, None


def _compute_hidden_gradient(
    grad_logits: Tensor, weight: Tensor, grad: Tensor, targets: Tensor | None = None, grad_lse: Tensor | None = None
) -> Tensor:
    """Return (grad_logits @ weight) * grad + weight[targets] * grad_lse, with grad and grad_lse (tokens, 1)."""
    result = (grad_logits @ weight) * grad
    if targets is not None and grad_lse is not None:
        result = result + weight[targets] * grad_lse
    return result.to(grad_logits.dtype)


def _compute_weight_gradient(
    grad_logits: Tensor, hidden: Tensor, grad: Tensor, targets: Tensor | None = None, grad_lse: Tensor | None = None
) -> Tensor:
    """Return grad_logits.T @ (hidden * grad), plus hidden * grad_lse in the targets' rows; grads are (tokens, 1)."""
    result = _multiply_with_row_factors(grad_logits, hidden, grad)
    if targets is None or grad_lse is None:
        return result
    # bfloat16 has the range of float32; in float16 the small factors of a sum over many tokens would be lost.
    dtype = torch.float32 if hidden.dtype == torch.float16 else hidden.dtype
    rows = (hidden * grad_lse).to(dtype)
    # index_add_ adds in any order on a GPU; this operation is deterministic.
    on_targets: Tensor = torch.ops.aten.embedding_dense_backward(rows, targets, grad_logits.shape[1], -1, False)
    return (result + on_targets).to(result.dtype)


_WEIGHT_PRODUCT = MatrixProduct(lambda grad_logits, hidden, grad: (grad_logits.T, (hidden * grad).to(hidden.dtype)))
"""Weight gradient where no loss depends on lse, except in float16, which would lose small factors."""


def _multiply_with_row_factors(grad_logits: Tensor, hidden: Tensor, grad: Tensor) -> Tensor:
    """Return grad_logits.T @ (hidden * grad), where grad (tokens, 1) may be too small for a product in float16."""
    if grad_logits.dtype != torch.float16:
        return grad_logits.T @ (hidden * grad).to(grad_logits.dtype)
    largest = grad.abs().amax().clamp_min(TINY) if len(grad) else grad.sum()
    product = grad_logits.T @ (hidden * (grad / largest)).to(grad_logits.dtype)
    return (product.float() * largest).to(grad_logits.dtype)


@compute_at_once_if_hooked
class _InChunks(Function):
    """
    Cross entropy whose forward pass also computes gradients, for the sum of losses times `factors`.

    The backward pass multiplies these by the losses' gradients. It recomputes the weight's gradient if the losses'
    gradients differ, and everything if lse has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        ignore_index: int,
        wants_gradients: bool,
        weight_gradient: WeightGradient,
        factors: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return losses and lse like `_WholeLogits`; `factors`, float32 (tokens,), multiply losses and gradients."""
        needs_hidden, needs_weight = (wants_gradients and needs_grad for needs_grad in ctx.needs_input_grad[:2])
        inputs = hidden, weight, targets, factors, ignore_index
        losses, lse, grad_hidden, grad_weight = _compute_in_chunks(*inputs, needs_hidden, needs_weight, MAX_LOGITS)
        ctx.save_for_backward(hidden, weight, targets, factors, lse, grad_hidden, grad_weight)
        ctx.cut, ctx.implementation = LogitCut(ignore_index=ignore_index), cut_cross_entropy_triton
        ctx.weight_gradient = weight_gradient
        pass_none_for_unused_grads(ctx)
        return losses, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_losses: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden, weight, targets, factors, lse, sum_grad_hidden, sum_grad_weight = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if grad_losses is None or grad_lse is not None:
            # The forward pass's gradients assume that the losses alone have a gradient.
            weighted = None if grad_losses is None else grad_losses * factors
            computed = compute_cut_gradients(ctx, hidden, weight, targets, lse, weighted, grad_lse)
            return *computed, None, None, None, None, None
        is_uniform = not grad_losses.numel() or grad_losses.stride(0) == 0 or grad_losses.numel() == 1
        finite = grad_losses.where(targets != ctx.cut.ignore_index, 0)
        grad_hidden = (sum_grad_hidden * finite.unsqueeze(-1)).to(hidden.dtype) if needs_hidden else None
        if not needs_weight:
            return grad_hidden, None, None, None, None, None, None
        if is_uniform:
            grad_weight = ctx.weight_gradient(_scale_and_cast_gradient, sum_grad_weight, grad_losses[:1], weight)
        else:
            local = find_local_target_rows(targets, len(weight), ctx.cut.ignore_index, None)
            recompute = RecomputedWeightGradient(ctx.implementation, ctx.cut)
            grad_weight = ctx.weight_gradient(recompute, hidden, weight, local, lse, finite * factors)
        return grad_hidden, grad_weight, None, None, None, None, None


def _scale_and_cast_gradient(gradient: Tensor, factor: Tensor, weight: Tensor) -> Tensor:
    """Scale a gradient, and cast it to the sums' dtype; without tokens there is no factor."""
    dtype = weight.grad_dtype if weight.is_leaf else weight.dtype
    return (gradient * factor if len(factor) else gradient).to(dtype=dtype)


def _allocate_losses_and_grad_logits(hidden: Tensor, weight: Tensor, needed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses and lse by token, and the logits' gradients, empty if not needed."""
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    return losses, torch.empty_like(losses), hidden.new_empty((len(hidden), len(weight)) if needed else 0)


def _count_unreturned_logits_bytes(hidden: Tensor, weight: Tensor, needed: bool) -> int:
    # Logits whose gradients are needed are a result.
    return 0 if needed else count_logits_bytes(hidden, weight, MAX_LOGITS)


@register_operator(
    "linear_cross_entropy_grad_logits",
    _allocate_losses_and_grad_logits,
    flops=lambda hidden, weight: 2.0 * hidden.numel() * len(weight),
    scratch=_count_unreturned_logits_bytes,
)
def _compute_losses_and_grad_logits(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, needed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    lse = torch.empty_like(losses)
    logits = hidden @ weight.T
    _fill_losses_and_grad_logits(logits, targets, losses, lse, None, ignore_index, needed)
    return losses, lse, logits if needed else hidden.new_empty(0)


def _allocate_forward(
    hidden: Tensor, weight: Tensor, needs_hidden: bool, needs_weight: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses and lse by token, and gradients for the sum of losses, empty if not needed."""
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    grad_hidden = hidden.new_empty(hidden.shape if needs_hidden else 0)
    grad_weight = weight.new_empty(weight.shape if needs_weight else 0, dtype=torch.float32)
    return losses, torch.empty_like(losses), grad_hidden, grad_weight


@register_kernel("linear_cross_entropy", _allocate_forward, flops=count_gradient_flops, scratch=count_logits_bytes)
def _compute_in_chunks(
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    factors: Tensor,
    ignore_index: int,
    needs_hidden: bool,
    needs_weight: bool,
    max_logits: int,
) -> None:
    losses, lse, grad_hidden, grad_weight = results
    grad_weight.zero_()
    wants_gradients = needs_hidden or needs_weight
    for chunk in _split_token_chunks(len(hidden), len(weight), max_logits):
        part = hidden[chunk]
        logits = part @ weight.T
        _fill_losses_and_grad_logits(
            logits, targets[chunk], losses[chunk], lse[chunk], factors[chunk], ignore_index, wants_gradients
        )
        if needs_hidden:
            torch.mm(logits, weight, out=grad_hidden[chunk])
        if needs_weight:
            addmm_fp32(grad_weight, logits.T, part)
        del logits  # or they would live until the next chunk's are computed


def _split_token_chunks(tokens: int, vocab: int, max_logits: int) -> Iterator[slice]:
    """Return slices with nearly equal sizes, within `max_logits` if MULTIPLE tokens are."""
    max_tokens = max(1, max_logits // (vocab * MULTIPLE)) * MULTIPLE
    parts = max(1, -(-tokens // max_tokens))
    size = max(1, -(-tokens // parts // MULTIPLE)) * MULTIPLE
    return (slice(start, start + size) for start in range(0, tokens, size))


def _fill_losses_and_grad_logits(
    logits: Tensor,
    targets: Tensor,
    losses: Tensor,
    lse: Tensor,
    factors: Tensor | None,
    ignore_index: int,
    wants_gradients: bool,
) -> None:
    """
    Fill losses and lse (tokens,); if `wants_gradients`, overwrite logits (tokens, vocabulary) with the losses'
    gradients.

    Losses and gradients are multiplied by `factors` (tokens,). Without factors, ignored tokens get lse's gradients, and
    the backward pass masks them.
    """
    tokens, vocab = logits.shape
    block = min(BLOCK, next_power_of_2(vocab))
    if not logits.numel():
        return
    _cross_entropy_kernel[(tokens,)](
        logits,
        targets.contiguous(),
        losses,
        lse,
        factors,
        vocab,
        logits.stride(0),
        ignore_index,
        LEARNS=wants_gradients,
        BLOCK=block,
        DEPTH=DEPTH,
        num_warps=max(1, block // 256),
    )


# fmt: off
@cache_launches("ignore_index")
def _cross_entropy_kernel(
    logits, targets, losses, lse, factors, words, stride, ignore_index,
    LEARNS: constexpr, BLOCK: constexpr, DEPTH: constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + token)
    logits += token * stride
    word = tl.arange(0, DEPTH)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    largest = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, words, DEPTH * BLOCK):
        inside = start + word < words
        values = load_float32(logits + start + word, inside)
        values = tl.where(inside, values, -1e38)  # -inf minus -inf would be NaN
        previous, largest = largest, tl.maximum(largest, tl.max(values, 0))
        total = total * tl.exp(previous - largest) + tl.sum(tl.exp(values - largest[None, :]), 0)
    row_max = tl.max(largest, 0)
    row_lse = row_max + tl.log(tl.sum(total * tl.exp(largest - row_max), 0))
    exists = (target >= 0) & (target < words)
    target_logit = load_float32(logits + target, exists)
    loss = tl.where(exists, row_lse - target_logit, float("nan"))
    loss = tl.where(target == ignore_index, 0.0, loss)
    factor = 1.0
    if factors is not None:
        factor = tl.load(factors + token)
    tl.store(losses + token, loss * factor)
    tl.store(lse + token, row_lse)
    if not LEARNS:
        return
    # The target's logit is read before any warp writes gradients over it.
    tl.debug_barrier()
    learned = tl.where(target == ignore_index, -1, target)
    for start in range(0, words, DEPTH * BLOCK):
        inside = start + word < words
        values = load_float32(logits + start + word, inside)
        values = tl.exp(values - row_lse) - tl.where(start + word == learned, 1.0, 0.0)
        tl.store(logits + start + word, factor * values, mask=inside)
