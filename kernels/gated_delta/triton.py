"""
Recurrent layers in Triton: the causal convolution with SiLU, and the gated delta rule in chunks with 64 tokens.

In the convolution all taps but the first read a token's channels from the cache. Its backward pass has two kernels: one
computes the gradient before SiLU, and the weight's gradient; the other one is the convolution in the other direction.
Sums over tokens have a fixed order.

The delta rule's forward pass has three kernels: they solve the triangular systems by chunk, carry the state from chunk
to chunk, and compute results. The backward pass computes the states again from the written values, carries the state's
gradient from the last chunk to the first, and computes all other gradients by chunk, in kernels with one or two large
sums each: with more, a multiprocessor has registers for one program only, and waits for memory.

For a chunk with keys K, queries Q, values V and the incoming state S, all tokens solve (I + A) N = beta (V - e K S): A
is the strictly lower part in beta K K^T D, where D has the decays from token to token within a document, and e the
decays from the incoming state. Then the results are e Q S + (Q K^T D) N, and the next state is the decayed S
plus (f K)^T N, where f has the decays to the chunk's end.

Products with accumulated tiles in 16 bits take these as they are: Triton 3.6 multiplies their transposes wrongly on
Hopper. A transposed product is computed from transposed loads, or stored and loaded again. In a loop with several
stages, a loaded tile is an operand of products or read by other operations, and never both: Triton 3.6 then loads the
next tile over it while products still read it. `compute_key_gradients` has such tiles, and one stage.

If every key channel has a decay, `channel_delta/triton.py` decays queries and keys, solves the systems and computes
gradients for both; D is in the queries and keys. The other kernels then have BY_CHANNEL, or weights Q K^T D.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from drawloom.kernels.channel_delta.triton import (
    DecayedKeys,
    compute_gradients_by_channel,
    solve_systems_by_channel,
)
from drawloom.kernels.documents import RecurrentDocuments
from drawloom.kernels.operation import make_differentiable, register_kernel
from drawloom.kernels.triton.chunks import (
    CHUNK,
    CHUNK_SIZE,
    MIN_BLOCK,
    MIN_GATE,
    ChunkSizes,
    carry_states,
    exp_where,
    invert_unit_lower_triangular,
    load_by_token,
    load_chunk_document_ids,
    load_decays,
    load_state_tile,
    load_tile,
    load_transposed,
    locate_chunk_and_head,
    locate_tokens,
    mask_causal_document_pairs,
    mask_document_pairs_by_key,
    multiply,
    multiply_columns,
    store_state_tile,
    store_tile,
)
from drawloom.kernels.triton.primitives import (
    cache_launches,
    cdiv,
    check_floats,
    load_float32,
    load_or_zero,
    mask_tile,
    next_power_of_2,
    sum_partials,
)

TOKENS, CHANNELS = 64, 64
"""Tokens and channels in a program."""


def causal_conv_triton(x: Tensor, weight: Tensor, ids: Tensor, silu: bool = True) -> Tensor:
    """
    Compute causal_conv_eager for float32, bfloat16 and float16.

    x (rows, length, channels), weight (channels, taps), ids int32 (rows, length).
    """
    check_floats("causal_conv_triton", x, weight)
    return _differentiable_causal_conv(x, weight, ids, silu)


@register_kernel("causal_conv", lambda x: x.new_empty(x.shape))
def _causal_conv(result: Tensor, x: Tensor, weight: Tensor, ids: Tensor, silu: bool) -> None:
    if x.numel():
        rows, length, channels = x.shape
        grid = rows * cdiv(length, TOKENS), cdiv(channels, CHANNELS)
        constants = _kernel_constants(weight)
        _conv_kernel[grid](x.contiguous(), weight.contiguous(), ids, result, length, SILU=silu, **constants)


def _kernel_constants(weight: Tensor) -> dict[str, int]:
    channels, taps = weight.shape
    return {"SIZE": channels, "TAPS": taps, "TOKENS": TOKENS, "BLOCK": CHANNELS}


def _count_conv_backward_scratch_bytes(x: Tensor, weight: Tensor) -> int:
    """Return the backward pass's temporary bytes: the gradient before the gate, and partial weight gradients."""
    return x.nbytes + x.shape[0] * cdiv(x.shape[1], TOKENS) * weight.numel() * 4


@register_kernel(
    "causal_conv_backward",
    lambda x, weight: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    scratch=_count_conv_backward_scratch_bytes,
)
def _causal_conv_backward(
    grads: tuple[Tensor, Tensor], grad: Tensor, x: Tensor, weight: Tensor, ids: Tensor, silu: bool
) -> None:
    (grad_x, grad_weight), (rows, length, channels) = grads, x.shape
    if not x.numel():
        grad_weight.zero_()
        return
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    grid = rows * cdiv(length, TOKENS), cdiv(channels, CHANNELS)
    before_gate = torch.empty_like(x)
    parts = x.new_empty(grid[0], weight.numel(), dtype=torch.float32)
    constants = _kernel_constants(weight)
    own = {"TAP_BLOCK": next_power_of_2(weight.shape[1]), "SILU": silu}
    _gate_gradient_kernel[grid](grad, x, weight, ids, before_gate, parts, length, **own, **constants)
    _input_gradient_kernel[grid](before_gate, weight, ids, grad_x, length, **constants)
    sum_partials(parts, grad_weight)


_differentiable_causal_conv = make_differentiable(_causal_conv, _causal_conv_backward)


@triton.jit
def _locate_tile(length, SIZE: constexpr, TOKENS: constexpr, BLOCK: constexpr):
    """Return the row's first token among all rows, this program's tokens, channels, and whether elements exist."""
    tiles = (length + TOKENS - 1) // TOKENS
    first = (tl.program_id(0) // tiles).to(tl.int64) * length
    token = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return first, token, channel, mask_tile(token < length, channel < SIZE)


@triton.jit
def _load_shifted(x, ids, own, first, token, channel, inside, length, lag, SIZE: constexpr):
    """Load the channels of tokens `lag` before, or after if it is negative; 0 in other documents."""
    other = token - lag
    exists = (other >= 0) & (other < length)
    number = tl.load(ids + first + other, mask=exists, other=-1)
    is_same = inside & (exists & (number == own))[:, None]
    return load_float32(x + (first + other)[:, None] * SIZE + channel[None, :], is_same)


@triton.jit
def _convolve(
    x, weight, ids, own, first, token, channel, inside, length, SIGN: constexpr, SIZE: constexpr,
    TAPS: constexpr, TOKENS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Return sums over taps, for tokens before if SIGN is 1 and after if it is -1."""
    summed = tl.zeros((TOKENS, BLOCK), tl.float32)
    for lag in tl.static_range(TAPS):
        factors = load_float32(weight + channel * TAPS + TAPS - 1 - lag, channel < SIZE)
        summed += factors[None, :] * _load_shifted(x, ids, own, first, token, channel, inside, length, SIGN * lag, SIZE)
    return summed


# fmt: off
@cache_launches("length")
def _conv_kernel(
    x, weight, ids, result, length, SILU: constexpr, SIZE: constexpr, TAPS: constexpr, TOKENS: constexpr,
    BLOCK: constexpr,
):
    # fmt: on
    """Store the convolution of a tile, gated if SILU."""
    first, token, channel, inside = _locate_tile(length, SIZE, TOKENS, BLOCK)
    own = tl.load(ids + first + token, mask=token < length, other=-2)
    summed = _convolve(x, weight, ids, own, first, token, channel, inside, length, 1, SIZE, TAPS, TOKENS, BLOCK)
    if SILU:
        summed *= tl.sigmoid(summed)
    offsets = (first + token)[:, None] * SIZE + channel[None, :]
    tl.store(result + offsets, summed, mask=inside)


# fmt: off
@cache_launches("length")
def _gate_gradient_kernel(
    grad, x, weight, ids, before_gate, parts, length, SIZE: constexpr, TAPS: constexpr, TOKENS: constexpr,
    BLOCK: constexpr, TAP_BLOCK: constexpr, SILU: constexpr,
):
    # fmt: on
    """Store the gradient before the gate, if SILU, and partial sums for the weight's gradient."""
    first, token, channel, inside = _locate_tile(length, SIZE, TOKENS, BLOCK)
    own = tl.load(ids + first + token, mask=token < length, other=-2)
    offsets = (first + token)[:, None] * SIZE + channel[None, :]
    grads = load_float32(grad + offsets, inside)
    if SILU:
        summed = _convolve(x, weight, ids, own, first, token, channel, inside, length, 1, SIZE, TAPS, TOKENS, BLOCK)
        gate = tl.sigmoid(summed)
        grads *= gate * (1.0 + summed * (1.0 - gate))
    tl.store(before_gate + offsets, grads, mask=inside)
    tap, sums = tl.arange(0, TAP_BLOCK)[None, :], tl.zeros((BLOCK, TAP_BLOCK), tl.float32)
    for lag in tl.static_range(TAPS):
        product = tl.sum(grads * _load_shifted(x, ids, own, first, token, channel, inside, length, lag, SIZE), 0)
        sums += tl.where(tap == TAPS - 1 - lag, product[:, None], 0.0)
    part = parts + tl.program_id(0).to(tl.int64) * (SIZE * TAPS) + channel[:, None] * TAPS + tap
    tl.store(part, sums, mask=(channel < SIZE)[:, None] & (tap < TAPS))


# fmt: off
@cache_launches("length")
def _input_gradient_kernel(
    before_gate, weight, ids, grad_x, length, SIZE: constexpr, TAPS: constexpr, TOKENS: constexpr,
    BLOCK: constexpr,
):
    # fmt: on
    """Store the input's gradient: the convolution of the gradient before the gate, backwards in time."""
    first, token, channel, inside = _locate_tile(length, SIZE, TOKENS, BLOCK)
    own = tl.load(ids + first + token, mask=token < length, other=-2)
    grads = _convolve(
        before_gate, weight, ids, own, first, token, channel, inside, length, -1, SIZE, TAPS, TOKENS, BLOCK
    )
    offsets = (first + token)[:, None] * SIZE + channel[None, :]
    tl.store(grad_x + offsets, grads, mask=inside)


# fmt: off
@cache_launches("length", "chunks")
def solve_chunk_systems(
    k, v, g, beta, ids, before, decays, inverse, keys, written, length, chunks, HEADS: constexpr,
    GROUPS: constexpr, K: constexpr, V: constexpr, BK: constexpr, BV: constexpr,
    PRECISION: constexpr,
):
    # fmt: on
    """Store, by chunk and head, the decay sums, the inverse system, and its products with keys and values."""
    _number, head, row, chunk, tokens = locate_chunk_and_head(tl.program_id(0), length, chunks, HEADS)
    head_tokens, key_tokens = tokens + (head, HEADS), tokens + (head // GROUPS, HEADS // GROUPS)
    first, token, inside = tokens
    own, incoming, _last, _end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    channel = tl.arange(0, BK)
    by_head = (first + token) * HEADS + head
    factors = load_by_token(beta, head_tokens).to(tl.float32)
    key = load_tile(k, key_tokens, channel, K)
    gates = tl.maximum(load_by_token(g, head_tokens).to(tl.float32), MIN_GATE)
    is_pair = mask_causal_document_pairs(own, inside)
    sums = tl.sum(tl.where(is_pair, gates[None, :], 0.0), 1)
    tl.store(decays + by_head, sums, mask=inside)
    pair_decay = exp_where(is_pair, sums[:, None] - sums[None, :])
    products = multiply(key, tl.trans(key), PRECISION)
    system = tl.where(token[:, None] > token[None, :], factors[:, None] * products * pair_decay, 0.0)
    # With unit keys all numbers are small: float16 has the precision of TF32, and shorter products.
    DTYPE: constexpr = tl.float16 if key.dtype.primitive_bitwidth == 16 else tl.float32
    solved = invert_unit_lower_triangular(system, DTYPE, PRECISION)
    store_tile(inverse, head_tokens, token, CHUNK, solved)
    from_state = tl.where(own == incoming, tl.exp(sums), 0.0)
    weighted = (solved * (factors * from_state)[None, :]).to(key.dtype)
    product = multiply(weighted, key, PRECISION)
    store_tile(keys, head_tokens, channel, K, product)
    multiply_columns((solved * factors[None, :]).to(key.dtype), v, written, head_tokens, V, BV, PRECISION)


# fmt: off
@cache_launches("length", "chunks")
def multiply_keys_by_inverse(
    k, beta, inverse, decays, ids, before, keys, length, chunks, HEADS: constexpr, GROUPS: constexpr,
    K: constexpr, BK: constexpr, PRECISION: constexpr, BY_CHANNEL: constexpr,
):
    # fmt: on
    """Store the inverse systems' products with keys, as `solve_chunk_systems` does."""
    _number, head, row, chunk, tokens = locate_chunk_and_head(tl.program_id(0), length, chunks, HEADS)
    head_tokens, key_tokens = tokens + (head, HEADS), tokens + (head // GROUPS, HEADS // GROUPS)
    _first, token, _inside = tokens
    own, incoming, _last, _end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    channel = tl.arange(0, BK)
    factors = load_by_token(beta, head_tokens).to(tl.float32)
    key = load_tile(k, key_tokens, channel, K)
    solved = load_tile(inverse, head_tokens, token, CHUNK).to(tl.float32)
    if not BY_CHANNEL:
        factors *= tl.where(own == incoming, tl.exp(load_by_token(decays, head_tokens)), 0.0)
    weighted = (solved * factors[None, :]).to(key.dtype)
    product = multiply(weighted, key, PRECISION)
    store_tile(keys, head_tokens, channel, K, product)


# fmt: off
@cache_launches("length", "chunks")
def carry_states_and_update_written(
    k, keys, written, decays, ids, before, state, states, result, length, chunks, HEADS: constexpr,
    GROUPS: constexpr, K: constexpr, V: constexpr, BK: constexpr, BV: constexpr,
    PRECISION: constexpr, BY_CHANNEL: constexpr,
):
    # fmt: on
    """
    Pass the state through a row's chunks: store the state before every chunk, the written values, and the last state.
    """
    row, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    token, channel = tl.arange(0, CHUNK), tl.arange(0, BK)
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    carried = tl.zeros((BK, BV), tl.float32)
    if state is not None:
        carried += load_state_tile(state, row * HEADS + head, channel, column, K, V).to(tl.float32)
    incoming = tl.load(before + row)
    for chunk in range(0, chunks):
        narrow = carried.to(states.dtype.element_ty)
        store_state_tile(states, (row * chunks + chunk) * HEADS + head, channel, column, K, V, narrow)
        tokens = locate_tokens(row, chunk, length)
        head_tokens, key_tokens = tokens + (head, HEADS), tokens + (head // GROUPS, HEADS // GROUPS)
        first, token, inside = tokens
        end = tl.minimum(length - chunk * CHUNK, CHUNK) - 1
        own = tl.load(ids + first + token, mask=inside, other=-2)
        last = tl.load(ids + first + end)
        _sums, to_end, kept = load_decays(decays, head_tokens, end, own, last, channel, K, BY_CHANNEL)
        seen = load_tile(keys, head_tokens, channel, K)
        values = load_tile(written, head_tokens, column, V).to(tl.float32)
        values -= multiply(seen, narrow, PRECISION)
        store_tile(written, head_tokens, column, V, values)
        key = load_transposed(k, key_tokens, channel, K)
        carried = carried * tl.where(last == incoming, kept, 0.0)
        carried += multiply(key, (values * to_end[:, None]).to(key.dtype), PRECISION)
        incoming = last
    if result is not None:
        store_state_tile(result, row * HEADS + head, channel, column, K, V, carried)


# fmt: off
@cache_launches("length", "chunks")
def compute_results(
    q, k, written, states, decays, ids, before, weights, result, length, chunks, HEADS: constexpr,
    GROUPS: constexpr, K: constexpr, V: constexpr, BK: constexpr, BV: constexpr,
    PRECISION: constexpr,
):
    # fmt: on
    """
    Store the results e Q S + (Q K^T D) N for one chunk, head and block of BV columns.

    If there are `weights`, they are Q K^T D, and queries include e.
    """
    BLOCKS: constexpr = (V + BV - 1) // BV
    number, head, row, chunk, tokens = locate_chunk_and_head(tl.program_id(0) // BLOCKS, length, chunks, HEADS)
    head_tokens, key_tokens = tokens + (head, HEADS), tokens + (head // GROUPS, HEADS // GROUPS)
    _first, token, inside = tokens
    own, incoming, _last, _end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    channel = tl.arange(0, BK)
    column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    if weights is None:
        sums = load_by_token(decays, head_tokens)
        query = load_tile(q, key_tokens, channel, K)
        key = load_transposed(k, key_tokens, channel, K)
        state = load_state_tile(states, number * HEADS + head, channel, column, K, V)
        from_state = tl.where(own == incoming, tl.exp(sums), 0.0)
        mixed = from_state[:, None] * multiply(query, state, PRECISION)
        is_pair = mask_causal_document_pairs(own, inside)
        pair_decay = exp_where(is_pair, sums[:, None] - sums[None, :])
        scores = multiply(query, key, PRECISION) * pair_decay
    else:
        query = load_tile(q, head_tokens, channel, K)
        mixed = multiply(query, load_state_tile(states, number * HEADS + head, channel, column, K, V), PRECISION)
        scores = load_tile(weights, head_tokens, token, CHUNK)
    values = load_tile(written, head_tokens, column, V)
    mixed += multiply(scores.to(values.dtype), values, PRECISION)
    store_tile(result, head_tokens, column, V, mixed)


# fmt: off
@cache_launches("length", "chunks")
def compute_gradients_within_chunks(
    grad, q, k, written, decays, ids, weights, grad_written, grad_scores, grad_decays, length, chunks,
    HEADS: constexpr, GROUPS: constexpr, K: constexpr, V: constexpr, BK: constexpr, BV: constexpr,
    PRECISION: constexpr,
):
    # fmt: on
    """
    Store gradients through results in the same chunk: for written values, and, by key and query, for scores without
    decays. Start the decay sums' gradients. With `weights`, see `compute_results`, store gradients for these instead.
    """
    _number, head, _row, _chunk, tokens = locate_chunk_and_head(tl.program_id(0), length, chunks, HEADS)
    head_tokens, key_tokens = tokens + (head, HEADS), tokens + (head // GROUPS, HEADS // GROUPS)
    first, token, inside = tokens
    channel = tl.arange(0, BK)
    by_head = (first + token) * HEADS + head
    own = tl.load(ids + first + token, mask=inside, other=-2)
    is_pair = mask_document_pairs_by_key(own, inside)
    # By key and query: the transpose of the scores.
    if weights is None:
        sums = load_by_token(decays, head_tokens)
        query = load_transposed(q, key_tokens, channel, K)
        key = load_tile(k, key_tokens, channel, K)
        pair_decay = exp_where(is_pair, sums[None, :] - sums[:, None])
        scores = multiply(key, query, PRECISION) * pair_decay
    else:
        scores = load_transposed(weights, head_tokens, token, CHUNK)
    by_key = tl.zeros((CHUNK, CHUNK), tl.float32)
    for begin in range(0, V, BV):
        column = begin + tl.arange(0, BV)
        grads = load_tile(grad, head_tokens, column, V)
        values = load_tile(written, head_tokens, column, V)
        product = multiply(scores.to(grads.dtype), grads, PRECISION)
        store_tile(grad_written, head_tokens, column, V, product)
        by_key += multiply(values, tl.trans(grads), PRECISION)
    if weights is None:
        through_pairs = by_key * scores
        tl.store(grad_decays + by_head, tl.sum(through_pairs, 0) - tl.sum(through_pairs, 1), mask=inside)
        by_key *= pair_decay
    else:
        by_key = tl.where(is_pair, by_key, 0.0)
    store_tile(grad_scores, head_tokens, token, CHUNK, by_key)


# fmt: off
@cache_launches("length", "chunks")
def carry_gradients_back(
    grad, grad_last, q, k, keys, decays, ids, before, grad_written, grad_states, grad_state, length, chunks,
    HEADS: constexpr, GROUPS: constexpr, K: constexpr, V: constexpr, BK: constexpr, BV: constexpr,
    PRECISION: constexpr, BY_CHANNEL: constexpr,
):
    # fmt: on
    """Pass the state's gradient back through a row's chunks, and complete the written values' gradients."""
    row, head = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    channel = tl.arange(0, BK)
    column = tl.program_id(0) * BV + tl.arange(0, BV)
    carried = load_state_tile(grad_last, row * HEADS + head, channel, column, K, V).to(tl.float32)
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        narrow = carried.to(grad_states.dtype.element_ty)
        store_state_tile(grad_states, (row * chunks + chunk) * HEADS + head, channel, column, K, V, narrow)
        tokens = locate_tokens(row, chunk, length)
        head_tokens, key_tokens = tokens + (head, HEADS), tokens + (head // GROUPS, HEADS // GROUPS)
        own, incoming, last, end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
        sums, to_end, kept = load_decays(decays, head_tokens, end, own, last, channel, K, BY_CHANNEL)
        from_state = tl.where(own == incoming, tl.exp(sums), 0.0)
        key = load_tile(k, key_tokens, channel, K)
        values = load_tile(grad_written, head_tokens, column, V).to(tl.float32)
        values += to_end[:, None] * multiply(key, narrow, PRECISION)
        store_tile(grad_written, head_tokens, column, V, values)
        query = load_transposed(q, key_tokens, channel, K)
        seen = load_transposed(keys, head_tokens, channel, K)
        grads = load_tile(grad, head_tokens, column, V).to(tl.float32)
        carried = carried * tl.where(last == incoming, kept, 0.0)
        carried += multiply(query, (from_state[:, None] * grads).to(query.dtype), PRECISION)
        carried -= multiply(seen, values.to(seen.dtype), PRECISION)
    if grad_state is not None:
        store_state_tile(grad_state, row * HEADS + head, channel, column, K, V, carried)


# fmt: off
@cache_launches("length", "chunks")
def compute_system_gradients(
    k, v, beta, inverse, written, grad_written, decays, ids, grad_v, grad_pairs, grad_factors, grad_decays, length,
    chunks, HEADS: constexpr, GROUPS: constexpr, K: constexpr, V: constexpr, BK: constexpr,
    BV: constexpr, PRECISION: constexpr, BY_CHANNEL: constexpr,
):
    # fmt: on
    """
    Store gradients through the solved systems, for values and for key pairs' products. Start beta's gradients, and add
    to the decay sums'. The right sides' gradients replace the written values'. By channel, the key pairs' gradients
    lack beta and decays, and all else that follows from them is for `compute_gradients_by_channel`.
    """
    _number, head, _row, _chunk, tokens = locate_chunk_and_head(tl.program_id(0), length, chunks, HEADS)
    head_tokens, key_tokens = tokens + (head, HEADS), tokens + (head // GROUPS, HEADS // GROUPS)
    first, token, inside = tokens
    channel = tl.arange(0, BK)
    by_head = (first + token) * HEADS + head
    own = tl.load(ids + first + token, mask=inside, other=-2)
    factors = load_by_token(beta, head_tokens).to(tl.float32)
    solved = load_transposed(inverse, head_tokens, token, CHUNK)
    by_pair = tl.zeros((CHUNK, CHUNK), tl.float32)
    to_factors = tl.zeros((CHUNK,), tl.float32)
    for begin in range(0, V, BV):
        column = begin + tl.arange(0, BV)
        grads = load_tile(grad_written, head_tokens, column, V)
        real = load_tile(v, head_tokens, column, V)
        wanted = multiply(solved, grads, PRECISION)
        store_tile(grad_v, head_tokens, column, V, factors[:, None] * wanted)
        store_tile(grad_written, head_tokens, column, V, wanted)
        to_factors += tl.sum(wanted * real.to(tl.float32), 1)
        values = load_tile(written, head_tokens, column, V)
        by_pair -= multiply(wanted.to(values.dtype), tl.trans(values), PRECISION)
    is_pair = mask_causal_document_pairs(own, inside) & (token[:, None] > token[None, :])
    if BY_CHANNEL:
        by_pair = tl.where(is_pair, by_pair, 0.0)
    else:
        sums = load_by_token(decays, head_tokens)
        key = load_tile(k, key_tokens, channel, K)
        by_pair *= exp_where(is_pair, sums[:, None] - sums[None, :])
        through_pairs = by_pair * multiply(key, tl.trans(key), PRECISION)
        to_factors += tl.sum(through_pairs, 1)
        through_pairs *= factors[:, None]
        grad_sums = load_by_token(grad_decays, head_tokens)
        grad_sums += tl.sum(through_pairs, 1) - tl.sum(through_pairs, 0)
        tl.store(grad_decays + by_head, grad_sums, mask=inside)
        by_pair *= factors[:, None]
    tl.store(grad_factors + by_head, to_factors, mask=inside)
    store_tile(grad_pairs, head_tokens, token, CHUNK, by_pair)


# fmt: off
@cache_launches("length", "chunks")
def compute_query_gradients(
    grad, q, k, states, grad_scores, decays, ids, before, part_decays, grad_q, length, chunks, HEADS: constexpr,
    GROUPS: constexpr, K: constexpr, V: constexpr, BK: constexpr, BV: constexpr,
    PRECISION: constexpr,
):
    # fmt: on
    """
    Store a key head's gradients for BK query channels, and their part in the decay sums' gradients (rows, length,
    parts, heads).
    """
    PARTS: constexpr = (K + BK - 1) // BK
    part = tl.program_id(0) % PARTS
    program = tl.program_id(0) // PARTS
    chunk_number, key_head, row, chunk, tokens = locate_chunk_and_head(program, length, chunks, HEADS // GROUPS)
    key_tokens = tokens + (key_head, HEADS // GROUPS)
    first, token, inside = tokens
    own, incoming, _last, _end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    channel = part * BK + tl.arange(0, BK)
    query = load_tile(q, key_tokens, channel, K)
    key = load_tile(k, key_tokens, channel, K)
    total = tl.zeros((CHUNK, BK), tl.float32)
    for number in range(GROUPS):
        head = key_head * GROUPS + number
        head_tokens = tokens + (head, HEADS)
        to_query = tl.zeros((CHUNK, BK), tl.float32)
        for begin in range(0, V, BV):
            column = begin + tl.arange(0, BV)
            state = load_state_tile(states, chunk_number * HEADS + head, channel, column, K, V)
            grads = load_tile(grad, head_tokens, column, V)
            to_query += multiply(grads, tl.trans(state), PRECISION)
        sums = load_by_token(decays, head_tokens)
        to_query *= tl.where(own == incoming, tl.exp(sums), 0.0)[:, None]
        by_part = ((first + token) * PARTS + part) * HEADS + head
        tl.store(part_decays + by_part, tl.sum(to_query * query.to(tl.float32), 1), mask=inside)
        scores = load_transposed(grad_scores, head_tokens, token, CHUNK)
        total += to_query
        total += multiply(scores, key, PRECISION)
    store_tile(grad_q, key_tokens, channel, K, total)


# fmt: off
@cache_launches("length", "chunks")
def compute_key_gradients(
    q, k, beta, written, states, grad_written, grad_states, grad_scores, grad_pairs, decays, ids, before, part_decays,
    part_factors, grad_k, length, chunks, HEADS: constexpr, GROUPS: constexpr, K: constexpr, V: constexpr,
    BK: constexpr, BV: constexpr, PRECISION: constexpr,
):
    # fmt: on
    """
    Store a value head's gradients for BK key channels, and their part in beta's gradients. Add to their part in the
    decay sums' gradients.
    """
    PARTS: constexpr = (K + BK - 1) // BK
    part = tl.program_id(0) % PARTS
    number, head, row, chunk, tokens = locate_chunk_and_head(tl.program_id(0) // PARTS, length, chunks, HEADS)
    head_tokens, key_tokens = tokens + (head, HEADS), tokens + (head // GROUPS, HEADS // GROUPS)
    first, token, inside = tokens
    own, incoming, last, end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    channel = part * BK + tl.arange(0, BK)
    through_state, to_key = tl.zeros((CHUNK, BK), tl.float32), tl.zeros((CHUNK, BK), tl.float32)
    along_state = tl.zeros((BK,), tl.float32)
    for begin in range(0, V, BV):
        column = begin + tl.arange(0, BV)
        state = load_state_tile(states, number * HEADS + head, channel, column, K, V)
        grad_state = load_state_tile(grad_states, number * HEADS + head, channel, column, K, V)
        wanted = load_tile(grad_written, head_tokens, column, V)
        values = load_tile(written, head_tokens, column, V)
        through_state += multiply(wanted, tl.trans(state), PRECISION)
        to_key += multiply(values, tl.trans(grad_state), PRECISION)
        along_state += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 1)
    factors = load_by_token(beta, head_tokens).to(tl.float32)
    sums = load_by_token(decays, head_tokens)
    total = tl.load(decays + (first + end) * HEADS + head)
    to_end = exp_where(own == last, total - sums)
    from_state = tl.where(own == incoming, tl.exp(sums), 0.0)
    key = load_tile(k, key_tokens, channel, K)
    to_key *= to_end[:, None]
    from_end = tl.sum(to_key * key.to(tl.float32), 1)
    along = -from_state * tl.sum(through_state * key.to(tl.float32), 1)
    at_end = tl.sum(from_end, 0) + tl.where(last == incoming, tl.exp(total), 0.0) * tl.sum(along_state, 0)
    grad_sums = factors * along - from_end + tl.where(token == end, at_end, 0.0)
    by_part = ((first + token) * PARTS + part) * HEADS + head
    grad_sums += load_or_zero(part_decays + by_part, inside)
    tl.store(part_decays + by_part, grad_sums, mask=inside)
    tl.store(part_factors + by_part, along, mask=inside)
    to_key -= (factors * from_state)[:, None] * through_state
    pairs = load_tile(grad_pairs, head_tokens, token, CHUNK)
    to_key += multiply(pairs, key, PRECISION)
    to_key += multiply(tl.trans(pairs), key, PRECISION)
    query = load_tile(q, key_tokens, channel, K)
    scores = load_tile(grad_scores, head_tokens, token, CHUNK)
    to_key += multiply(scores, query, PRECISION)
    store_tile(grad_k, head_tokens, channel, K, to_key)


# fmt: off
@cache_launches("length", "chunks")
def sum_g_and_beta_gradients_kernel(
    part_decays, part_factors, grad_decays, grad_factors, ids, grad_g, grad_beta, length, chunks, HEADS: constexpr,
    PARTS: constexpr,
):
    # fmt: on
    """Store gates' and beta's gradients: the sums over all parts, and for gates within a document and chunk."""
    _number, head, _row, _chunk, tokens = locate_chunk_and_head(tl.program_id(0), length, chunks, HEADS)
    head_tokens = tokens + (head, HEADS)
    first, token, inside = tokens
    by_head = (first + token) * HEADS + head
    own = tl.load(ids + first + token, mask=inside, other=-2)
    grad_sums = load_by_token(grad_decays, head_tokens)
    to_factors = load_by_token(grad_factors, head_tokens)
    for part in tl.static_range(PARTS):
        by_part = ((first + token) * PARTS + part) * HEADS + head
        grad_sums += load_or_zero(part_decays + by_part, inside)
        to_factors += load_or_zero(part_factors + by_part, inside)
    tl.store(grad_beta + by_head, to_factors, mask=inside)
    is_pair = mask_causal_document_pairs(own, inside)
    grad_gates = tl.sum(tl.where(is_pair, grad_sums[:, None], 0.0), 0)
    tl.store(grad_g + by_head, grad_gates, mask=inside)


# fmt: off
@cache_launches("count")
def sum_value_heads_kernel(grad, result, count, GROUPS: constexpr, K: constexpr, BK: constexpr, SIZE:
constexpr):
    # fmt: on
    """Store gradients summed over value heads with a common key head."""
    key_head = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    channel, inside = tl.arange(0, BK), key_head < count
    total = tl.zeros((SIZE, BK), tl.float32)
    for number in tl.static_range(GROUPS):
        total += load_tile(grad, (0, key_head, inside, number, GROUPS), channel, K).to(tl.float32)
    store_tile(result, (0, key_head, inside, 0, 1), channel, K, total)


MAX_WIDTH = 256
"""The widest key; values may have any width."""


def delta_rule_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    documents: RecurrentDocuments,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """
    Compute delta_rule_eager for float32, bfloat16 and float16, and keys with at most MAX_WIDTH channels.

    q and k (rows, length, key_heads, K), v (rows, length, value_heads, V), beta (rows, length, value_heads), and
    g like beta or (rows, length, value_heads, K); the state is float32 (rows, value_heads, K, V). In 16 bits, systems
    are inverted in float16: keys should have unit norm.
    """
    check_floats("delta_rule_triton", q, k, v, g, beta)
    if k.shape[-1] > MAX_WIDTH:
        raise ValueError(f"keys are {k.shape[-1]} wide, and the kernel accepts at most {MAX_WIDTH}")
    return _differentiable_delta_rule(q, k, v, g, beta, *documents, state)  # type: ignore[return-value]


def _allocate_forward(k: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return results, last states, decay sums or decayed scores, inverse systems and written values."""
    last = v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
    inverse = v.new_empty(*v.shape[:3], CHUNK_SIZE)
    decays = inverse.new_empty(inverse.shape) if _is_by_channel(g) else v.new_empty(v.shape[:3], dtype=torch.float32)
    return v.new_empty(v.shape), last, decays, inverse, v.new_empty(v.shape)


def _is_by_channel(g: Tensor) -> bool:
    """Return whether decays g (rows, length, value_heads, K or nothing) are by channel."""
    return g.ndim > 3


def _count_forward_flops(k: Tensor, v: Tensor) -> float:
    """Return the products' FLOPs, for all tokens and heads; strong decays by channel need more."""
    width, v_width = k.shape[3], v.shape[3]
    inside = 6 * CHUNK_SIZE * width + 4 * CHUNK_SIZE * v_width + 2 * CHUNK_SIZE * CHUNK_SIZE / 3
    return v.shape[:3].numel() * (6 * width * v_width + inside)


def _count_backward_flops(k: Tensor, v: Tensor) -> float:
    """Return the backward pass's FLOPs; it computes states again."""
    width, v_width = k.shape[3], v.shape[3]
    return v.shape[:3].numel() * (14 * width * v_width + 2 * CHUNK_SIZE * (6 * width + 4 * v_width))


def _count_state_bytes(k: Tensor, v: Tensor) -> int:
    """Return the bytes for the states before all chunks."""
    return cdiv(v.shape[1], CHUNK_SIZE) * v.shape[0] * v.shape[2] * k.shape[3] * v.shape[3] * v.itemsize


def _count_forward_scratch_bytes(k: Tensor, v: Tensor, g: Tensor) -> int:
    by_channel = 3 * v.itemsize + 4 if _is_by_channel(g) else 0
    return v.shape[:3].numel() * k.shape[3] * (v.itemsize + by_channel) + _count_state_bytes(k, v)


def _count_backward_scratch_bytes(k: Tensor, v: Tensor, g: Tensor) -> int:
    """Return the bytes for keys, gradients, states and sums."""
    keys = 1 if k.shape[2] == v.shape[2] else 3 if _is_by_channel(g) else 2
    by_token = (v.shape[3] + 2 * CHUNK_SIZE) * v.itemsize + 8 * (1 + cdiv(k.shape[3], MIN_BLOCK))
    by_channel = 3 * v.itemsize + 4 if _is_by_channel(g) else 0
    by_token += k.shape[3] * (keys * v.itemsize + by_channel)
    return v.shape[:3].numel() * by_token + 2 * _count_state_bytes(k, v)


@register_kernel(
    "gated_delta_rule", _allocate_forward, flops=_count_forward_flops, scratch=_count_forward_scratch_bytes
)
def _forward(
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ids: Tensor,
    before: Tensor,
    state: Tensor | None,
) -> None:
    mixed, last, decays, inverse, written = results
    if not v.shape[:3].numel():
        last.zero_() if state is None else last.copy_(state)
        return
    sizes = ChunkSizes.from_keys_and_values(k, v)
    q, k, v, g, beta, ids = (x.contiguous() for x in (q, k, v, g, beta, ids))
    constants, scores = sizes.constants, None
    state = None if state is None else state.contiguous()
    keys, states = v.new_empty(*v.shape[:3], sizes.width), sizes.allocate_states(v)
    if _is_by_channel(g):
        decayed, scores = DecayedKeys.compute(q, k, g, ids, before, sizes), decays
        solve_systems_by_channel(
            (q, k, v, beta, ids, before, decayed.k, decayed.sums), (scores, inverse, keys, written), sizes
        )
        q, k, decays, constants["GROUPS"] = decayed.q, decayed.k_to_end, decayed.sums, 1
    else:
        solve_chunk_systems[(sizes.chunk_head_count,)](
            *(k, v, g, beta, ids, before, decays, inverse, keys, written, sizes.length, sizes.chunks),
            **{**constants, "BV": sizes.wide_tile_columns},
            **sizes.limit_registers_for_small_tiles(168),
        )
    block = sizes.columns_per_carry_tile
    carry_states_and_update_written[(cdiv(sizes.v_width, block), sizes.rows * sizes.heads)](
        *(k, keys, written, decays, ids, before, state, states, last, sizes.length, sizes.chunks),
        **{**constants, "BV": block},
        BY_CHANNEL=scores is not None,
        num_stages=(4 if block < MIN_BLOCK else 2) if sizes.fits_several_chunks else 1,
    )
    compute_results[(sizes.chunk_head_count * cdiv(sizes.v_width, MIN_BLOCK),)](
        *(q, k, written, states, decays, ids, before, scores, mixed, sizes.length, sizes.chunks),
        **constants,
        **sizes.limit_registers_for_small_tiles(128),
    )


def _allocate_gradients(
    grad_state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None
) -> tuple[Tensor, ...]:
    grads = (x.new_empty(x.shape) for x in (q, k, v, g, beta))
    return *grads, grad_state.new_empty(grad_state.shape if state is not None else 0)


@register_kernel(
    "gated_delta_rule_backward",
    _allocate_gradients,
    flops=_count_backward_flops,
    scratch=_count_backward_scratch_bytes,
)
def _backward(
    grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    grad: Tensor,
    grad_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ids: Tensor,
    before: Tensor,
    state: Tensor | None,
    decays: Tensor,
    inverse: Tensor,
    written: Tensor,
) -> None:
    """
    Fill `grads`: gradients for q, k, v, g, beta and state.

    `grad` is the results' gradient, and `grad_state` the last state's. `decays`, `inverse` and `written` are the
    forward pass's other results, see `_allocate_forward`.
    """
    if not v.shape[:3].numel():
        if state is not None:
            grads[5].copy_(grad_state)
        return
    sizes = ChunkSizes.from_keys_and_values(k, v)
    grad, q, k, v, beta, ids = (x.contiguous() for x in (grad, q, k, v, beta, ids))
    constants = sizes.constants
    counts = sizes.length, sizes.chunks  # every kernel's last arguments
    by_channel, decayed, scores = _is_by_channel(g), DecayedKeys(q, k, k, decays), None
    if by_channel:
        decayed, scores = DecayedKeys.compute(q, k, g, ids, before, sizes), decays
        constants["GROUPS"] = 1
    keys = v.new_empty(*v.shape[:3], sizes.width)
    states, grad_states = (sizes.allocate_states(v) for _ in range(2))
    grad_written, grad_scores, grad_pairs = (torch.empty_like(x) for x in (v, inverse, inverse))
    grad_factors = torch.empty_like(beta, dtype=torch.float32)
    grad_decays = None if by_channel else torch.empty_like(decays)
    state = None if state is None else state.contiguous()
    multiply_keys_by_inverse[(sizes.chunk_head_count,)](
        *(decayed.k, beta, inverse, decayed.sums, ids, before, keys, *counts),
        **{name: constants[name] for name in ("HEADS", "GROUPS", "K", "BK", "PRECISION")},
        BY_CHANNEL=by_channel,
    )
    carry_states[(sizes.key_parts * cdiv(sizes.v_width, MIN_BLOCK), sizes.rows * sizes.heads)](
        *(decayed.k_to_end, written, decayed.sums, ids, before, state, states, None, *counts),
        **{**constants, "BK": MIN_BLOCK},
        BY_CHANNEL=by_channel,
        BACK=False,
        num_stages=4,
    )
    compute_gradients_within_chunks[(sizes.chunk_head_count,)](
        *(grad, q, k, written, decayed.sums, ids, scores, grad_written, grad_scores, grad_decays, *counts),
        **{**constants, "BV": sizes.wide_tile_columns},
        num_stages=2,
        **sizes.limit_registers_for_small_tiles(168),
    )
    block = sizes.columns_per_carry_tile
    carry_gradients_back[(cdiv(sizes.v_width, block), sizes.rows * sizes.heads)](
        *(grad, grad_state.contiguous(), decayed.q, decayed.k_to_end, keys, decayed.sums, ids, before, grad_written),
        *(grad_states, grads[5] if state is not None else None, *counts),
        **{**constants, "BV": block},
        BY_CHANNEL=by_channel,
        num_warps=4 if block < MIN_BLOCK else 8,
        num_stages=3 if sizes.fits_several_chunks else 1,
    )
    compute_system_gradients[(sizes.chunk_head_count,)](
        *(k, v, beta, inverse, written, grad_written, decayed.sums, ids, grads[2], grad_pairs, grad_factors),
        *(grad_decays, *counts),
        **constants,
        BY_CHANNEL=by_channel,
        num_stages=2,
        **sizes.limit_registers_for_small_tiles(168),
    )
    part_factors = decayed.sums.new_empty(sizes.rows, sizes.length, sizes.key_parts, sizes.heads)
    grad_q, grad_k = (x if sizes.groups == 1 else torch.empty_like(keys) for x in grads[:2])
    gradients = written, states, grad_written, grad_states, grad_scores, grad_pairs, decayed.sums, ids, before
    if by_channel:
        compute_gradients_by_channel(
            (grad, q, k, beta, *gradients), (grad_q, grad_k, grads[3], part_factors), sizes
        )
        grads[4].copy_(grad_factors + part_factors.sum(2))
        if sizes.groups > 1:
            _sum_over_value_heads(grad_q, grads[0], sizes)
    else:
        parts, part_decays = {**constants, "BK": MIN_BLOCK}, torch.empty_like(part_factors)
        compute_query_gradients[(sizes.chunk_head_count // sizes.groups * sizes.key_parts,)](
            *(grad, q, k, states, grad_scores, decays, ids, before, part_decays, grads[0], *counts),
            **parts,
            num_stages=3 if sizes.itemsize == 2 else 2,
            **sizes.limit_registers_for_small_tiles(128),
        )
        compute_key_gradients[(sizes.chunk_head_count * sizes.key_parts,)](
            *(q, k, beta, *gradients, part_decays, part_factors, grad_k, *counts),
            **parts,
            num_stages=1,  # with more, tiles would be overwritten while products read them
            **sizes.limit_registers_for_small_tiles(168),
        )
        sum_g_and_beta_gradients_kernel[(sizes.chunk_head_count,)](
            *(part_decays, part_factors, grad_decays, grad_factors, ids, grads[3], grads[4], *counts),
            HEADS=sizes.heads,
            PARTS=sizes.key_parts,
            num_warps=1,
        )
    if sizes.groups > 1:
        _sum_over_value_heads(grad_k, grads[1], sizes)


def _compute_gradients(*arguments: Tensor) -> tuple[Tensor | None, ...]:
    *grads, grad_state = _backward(*arguments)
    return *grads, None, None, grad_state


_differentiable_delta_rule = make_differentiable(_forward, _compute_gradients, results=2)
"""The gated delta rule; saves its inputs, decay sums, inverse systems and written values."""


def _sum_over_value_heads(grad: Tensor, summed: Tensor, sizes: ChunkSizes) -> None:
    """Write summed gradients (rows, length, value_heads, K) over value heads with a common key head."""
    count, block = summed.shape[:3].numel(), next_power_of_2(sizes.width)
    size = max(1, 4096 // block)
    sum_value_heads_kernel[(cdiv(count, size),)](
        grad, summed, count, GROUPS=sizes.groups, K=sizes.width, BK=block, SIZE=size
    )
