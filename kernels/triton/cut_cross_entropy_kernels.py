"""
The kernels of cut cross entropy: tiles of logits, and products with tiles of their gradients.

A tile is `TOKENS` by `WORDS`, computed over the width of the hidden states in steps, or read where logits are given;
sums are in float32. Programs that
run at the same time take the tokens of one tile of words, so that the weight is read once and the hidden states, which
are few, come from the cache. Each program writes what is its own: nothing is locked or added atomically.
"""

import triton
import triton.language as tl

from drawloom.kernels.triton.launch import lean

# fmt: off


@triton.jit
def _logits(
    logits, hidden, weight, token, word, row, width, tokens, words, logits_stride, hidden_stride, weight_stride,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, STEP: tl.constexpr,
):
    """A tile of logits, of these tokens and these rows of the weight."""
    if logits is not None:
        inside = (token < tokens)[:, None] & (word < words)[None, :]
        return tl.load(logits + token.to(tl.int64)[:, None] * logits_stride + row[None, :], mask=inside, other=0.0)
    else:
        return _product(
            hidden, weight, token, word, row, width, tokens, words, hidden_stride, weight_stride, TOKENS, WORDS, STEP,
        )


@triton.jit
def _product(
    hidden, weight, token, word, row, width, tokens, words, hidden_stride, weight_stride,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, STEP: tl.constexpr,
):
    """A tile of hidden @ weight.T."""
    total = tl.zeros((TOKENS, WORDS), tl.float32)
    channel = tl.arange(0, STEP)
    token_at = hidden + token.to(tl.int64)[:, None] * hidden_stride
    word_at = weight + row.to(tl.int64)[None, :] * weight_stride
    for start in range(0, width, STEP):
        inside = start + channel < width
        a = tl.load(token_at + (start + channel)[None, :], mask=(token < tokens)[:, None] & inside[None, :], other=0.0)
        b = tl.load(word_at + (start + channel)[:, None], mask=(word < words)[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a, b, total)
    return total


@lean
@triton.jit(do_not_specialize=["tokens"])
def lse_kernel(
    logits, hidden, weight, targets, lse, target_logit, tokens, words, width,
    logits_stride, hidden_stride, weight_stride, lse_stride,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, STEP: tl.constexpr,
):
    """For each token and tile of words log sum exp(logits), and the target's logit from the tile that has it."""
    across = tl.cdiv(tokens, TOKENS)
    token = (tl.program_id(0) % across) * TOKENS + tl.arange(0, TOKENS)
    tile = tl.program_id(0) // across
    word = tile * WORDS + tl.arange(0, WORDS)
    values = _logits(
        logits, hidden, weight, token, word, word, width, tokens, words, logits_stride, hidden_stride, weight_stride,
        TOKENS, WORDS, STEP,
    )
    values = tl.where((word < words)[None, :], values, -float("inf"))
    largest = tl.max(values, 1)
    total = largest + tl.log(tl.sum(tl.exp(values - largest[:, None]), 1))
    tl.store(lse + tile.to(tl.int64) * lse_stride + token, total, mask=token < tokens)
    target = tl.load(targets + token, mask=token < tokens, other=-1)
    own = tl.sum(tl.where(word[None, :] == target[:, None], values, 0.0), 1)
    # Each target lies in one tile, so no two programs write the same element.
    here = (target >= tile * WORDS) & (target < tl.minimum((tile + 1) * WORDS, words))
    tl.store(target_logit + token, own, mask=here)


@lean
@triton.jit(do_not_specialize=["tokens"])
def grad_logits_kernel(
    hidden, weight, order, targets, lse, grad, grad_lse, grad_logits, active, tokens, words, width,
    hidden_stride, weight_stride, logits_stride, grad_stride, filter_eps,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, STEP: tl.constexpr, GIVEN: tl.constexpr,
):
    """
    Gradients of logits, words in the given order, and which tiles hold any that counts; the others are not written.

    Where logits are `GIVEN` in place of their gradients, these replace them where they are, 0 where none counts.
    """
    across = tl.cdiv(tokens, TOKENS)
    down = tl.program_id(0) % across
    token = down * TOKENS + tl.arange(0, TOKENS)
    tile = tl.program_id(0) // across
    word = tile * WORDS + tl.arange(0, WORDS)
    row = word
    if order is not None:
        row = tl.load(order + word, mask=word < words, other=0)
    logits = _logits(
        grad_logits if GIVEN else None, hidden, weight, token, word, row, width, tokens, words,
        logits_stride, hidden_stride, weight_stride, TOKENS, WORDS, STEP,
    )
    inside = (token < tokens)[:, None] & (word < words)[None, :]
    total = tl.load(lse + token, mask=token < tokens, other=0.0)
    target = tl.load(targets + token, mask=token < tokens, other=-1)
    onehot = tl.where(row[None, :] == target[:, None], 1.0, 0.0)
    probs = tl.where(inside, tl.exp(logits - total[:, None]), 0.0)
    values = tl.where(inside, probs - onehot, 0.0)
    alive = True
    if order is not None:
        size = tl.abs(values)
        if grad_lse is not None:  # a target of probability 1 has no gradient of its loss, but one of its lse
            size = tl.maximum(size, probs)
        alive = tl.max(size) >= filter_eps
        tl.store(active + down * tl.cdiv(words, WORDS) + tile, alive.to(tl.int8))
    if GIVEN or alive:
        factor = tl.load(grad + token.to(tl.int64) * grad_stride, mask=token < tokens, other=0.0)
        values *= factor.to(tl.float32)[:, None]
        if grad_lse is not None:
            of_lse = tl.load(grad_lse + token, mask=token < tokens, other=0.0)
            values += onehot * of_lse.to(tl.float32)[:, None]
        values = tl.where(inside, values, 0.0)
        if GIVEN:
            at = grad_logits + token.to(tl.int64)[:, None] * logits_stride + row[None, :]
            tl.store(at, tl.where(alive, values, 0.0), mask=inside)
        else:
            at = grad_logits + token.to(tl.int64)[:, None] * logits_stride + word[None, :]
            # The padding of a row is written too: torch's bfloat16 matmul on a CPU reads it, and NaN * 0 is NaN.
            tl.store(at, values.to(grad_logits.dtype.element_ty), mask=(token < tokens)[:, None])


@lean
@triton.jit(do_not_specialize=["tokens"])
def grad_hidden_kernel(
    grad_logits, weight, order, tiles, counts, result, tokens, words, width,
    logits_stride, weight_stride, result_stride,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """grad_logits @ weight over the active tiles of words of each tile of tokens."""
    down, across = tl.program_id(0), tl.program_id(1)
    token = down * TOKENS + tl.arange(0, TOKENS)
    channel = across * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for place in range(0, tl.load(counts + down)):
        word = tl.load(tiles + down * tl.cdiv(words, WORDS) + place) * WORDS + tl.arange(0, WORDS)
        row = tl.load(order + word, mask=word < words, other=0)
        inside = (token < tokens)[:, None] & (word < words)[None, :]
        a = tl.load(grad_logits + token.to(tl.int64)[:, None] * logits_stride + word[None, :], mask=inside, other=0.0)
        within = (word < words)[:, None] & (channel < width)[None, :]
        b = tl.load(weight + row.to(tl.int64)[:, None] * weight_stride + channel[None, :], mask=within, other=0.0)
        total = tl.dot(a, b, total)
    at = result + token.to(tl.int64)[:, None] * result_stride + channel[None, :]
    tl.store(at, total.to(result.dtype.element_ty), mask=(token < tokens)[:, None] & (channel < width)[None, :])


@lean
@triton.jit(do_not_specialize=["tokens"])
def grad_weight_kernel(
    grad_logits, hidden, order, tiles, counts, result, tokens, words, width, logits_stride, hidden_stride,
    TOKENS: tl.constexpr, WORDS: tl.constexpr, CHANNELS: tl.constexpr,
):
    """Add grad_logits.T @ hidden to float32, over the active tiles of tokens of each tile of words."""
    down, across = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + down)
    if count == 0:
        return
    word = down * WORDS + tl.arange(0, WORDS)
    channel = across * CHANNELS + tl.arange(0, CHANNELS)
    row = tl.load(order + word, mask=word < words, other=0)
    inside = (word < words)[:, None] & (channel < width)[None, :]
    at = result + row.to(tl.int64)[:, None] * width + channel[None, :]
    total = tl.load(at, mask=inside, other=0.0)
    for place in range(0, count):
        token = tl.load(tiles + down * tl.cdiv(tokens, TOKENS) + place) * TOKENS + tl.arange(0, TOKENS)
        within = (token < tokens)[:, None] & (word < words)[None, :]
        a = tl.load(grad_logits + token.to(tl.int64)[:, None] * logits_stride + word[None, :], mask=within, other=0.0)
        known = (token < tokens)[:, None] & (channel < width)[None, :]
        b = tl.load(hidden + token.to(tl.int64)[:, None] * hidden_stride + channel[None, :], mask=known, other=0.0)
        total = tl.dot(tl.trans(a), b, total)
    tl.store(at, total, mask=inside)
