"""
Cut cross entropy kernels: logit tiles, and products with tiles of their gradients.

A tile is `TOKENS` by `WORDS`. It is computed over the hidden states' width in steps, or read if torch wrote logits;
sums are in float32. Concurrent programs process the tokens for one word tile, so the weight is read once and the few
hidden states come from the cache. A program writes its own elements: there are no locks and no atomic additions. With
`TMA`, factors are tensor descriptors with the product's blocks.
"""

import triton
import triton.language as tl

from drawloom.kernels.triton.launch import cache_launches

# fmt: off


@triton.jit
def _load_block(
    x, first_row, first_column, rows, columns, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr,
):
    """Load a matrix block, zero beyond the ends, by its descriptor or by its address."""
    if TMA:
        return x.load([first_row, first_column])
    else:
        row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        return tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def _get_logit_tile(
    logits, hidden, weight, token, word, width, tokens, words, logits_stride, hidden_stride, weight_stride,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, STEP: tl.constexpr, TMA: tl.constexpr,
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


@cache_launches
@triton.jit(do_not_specialize=["tokens"])
def lse_and_target_logit_kernel(
    logits, hidden, weight, targets, lse, target_logit, tokens, words, width,
    logits_stride, hidden_stride, weight_stride, lse_stride,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, STEP: tl.constexpr, TMA: tl.constexpr,
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


@cache_launches
@triton.jit(do_not_specialize=["tokens"])
def grad_logits_kernel(
    hidden, weight, targets, lse, grad, grad_lse, grad_logits, active, tokens, words, width,
    hidden_stride, weight_stride, logits_stride, grad_stride, filter_eps,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, STEP: tl.constexpr, TMA: tl.constexpr, HAS_LOGITS: tl.constexpr,
    FILTERED: tl.constexpr,
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
    inside = (token < tokens)[:, None] & (word < words)[None, :]
    total = tl.load(lse + token, mask=token < tokens, other=0.0)
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
        factor = tl.load(grad + token.to(tl.int64) * grad_stride, mask=token < tokens, other=0.0)
        values *= factor.to(tl.float32)[:, None]
        if grad_lse is not None:
            factor_lse = tl.load(grad_lse + token, mask=token < tokens, other=0.0)
            values += onehot * factor_lse.to(tl.float32)[:, None]
        values = tl.where(inside, values, 0.0)
        at = grad_logits + token.to(tl.int64)[:, None] * logits_stride + word[None, :]
        if HAS_LOGITS:
            tl.store(at, tl.where(is_active, values, 0.0), mask=inside)
        else:
            # The padding of a row is written, too: torch's bfloat16 matmul on a CPU reads it, and NaN * 0 is NaN.
            tl.store(at, values.to(grad_logits.dtype.element_ty), mask=(token < tokens)[:, None])


@cache_launches
@triton.jit(do_not_specialize=["tokens"])
def grad_hidden_kernel(
    grad_logits, weight, tiles, counts, result, tokens, words, width, logits_stride, weight_stride, result_stride,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr, TMA: tl.constexpr,
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
    tl.store(at, total.to(result.dtype.element_ty), mask=(token < tokens)[:, None] & (channel < width)[None, :])


@cache_launches
@triton.jit(do_not_specialize=["tokens"])
def add_grad_weight_kernel(
    grad_logits, hidden, tiles, counts, result, tokens, words, width, logits_stride, hidden_stride,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, CHANNELS: tl.constexpr, STEP: tl.constexpr, TMA: tl.constexpr,
):
    """Add grad_logits.T @ hidden to the float32 result by word tile, over active token tiles in steps."""
    down, left = tl.program_id(0), tl.program_id(1) * CHANNELS
    count, first = tl.load(counts + down), down * WORDS
    if count == 0:
        return
    word, channel = first + tl.arange(0, WORDS), left + tl.arange(0, CHANNELS)
    inside = (word < words)[:, None] & (channel < width)[None, :]
    at = result + word.to(tl.int64)[:, None] * width + channel[None, :]
    total = tl.load(at, mask=inside, other=0.0)
    for step in range(0, count * (TOKENS // STEP)):
        tile = tl.load(tiles + down * tl.cdiv(tokens, TOKENS) + step // (TOKENS // STEP))
        token = tile * TOKENS + step % (TOKENS // STEP) * STEP
        a = _load_block(grad_logits, token, first, tokens, words, logits_stride, STEP, WORDS, TMA)
        b = _load_block(hidden, token, left, tokens, width, hidden_stride, STEP, CHANNELS, TMA)
        total = tl.dot(a.T, b, total)
    tl.store(at, total, mask=inside)
