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

Heads follow each other in memory. Neighbouring programs have neighbouring heads, and read long pieces.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.gated_delta.eager import RecurrentDocuments
from drawloom.kernels.operation import make_differentiable, register_kernel
from drawloom.kernels.triton.launch import cache_launches, limit_registers
from drawloom.kernels.triton.primitives import (
    cdiv,
    check_floats,
    get_dot_precision,
    load_float32,
    load_or_zero,
    mask_tile,
    next_power_of_2,
    sm_count,
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
    return {"SIZE": channels, "TAPS": taps, "TOKENS": TOKENS, "BLOCK": CHANNELS, "num_warps": 4}


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
def _locate_tile(length, SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the row's first token among all rows, this program's tokens, channels, and whether elements exist."""
    tiles = (length + TOKENS - 1) // TOKENS
    first = (tl.program_id(0) // tiles).to(tl.int64) * length
    token = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return first, token, channel, mask_tile(token < length, channel < SIZE)


@triton.jit
def _load_shifted(x, ids, own, first, token, channel, inside, length, lag, SIZE: tl.constexpr):
    """Load the channels of tokens `lag` before, or after if it is negative; 0 in other documents."""
    other = token - lag
    exists = (other >= 0) & (other < length)
    number = tl.load(ids + first + other, mask=exists, other=-1)
    is_same = inside & (exists & (number == own))[:, None]
    return load_float32(x + (first + other)[:, None] * SIZE + channel[None, :], is_same)


@triton.jit
def _convolve(
    x, weight, ids, own, first, token, channel, inside, length, SIGN: tl.constexpr, SIZE: tl.constexpr,
    TAPS: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
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
    x, weight, ids, result, length, SILU: tl.constexpr, SIZE: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
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
    grad, x, weight, ids, before_gate, parts, length, SIZE: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr, TAP_BLOCK: tl.constexpr, SILU: tl.constexpr,
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
    before_gate, weight, ids, grad_x, length, SIZE: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
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


CHUNK_SIZE = 64
"""Tokens in a chunk."""

CHUNK = tl.constexpr(CHUNK_SIZE)

MIN_GATE = tl.constexpr(-40.0)
"""exp(-40) is 0 beside anything in float32, and sums with lower gates would lose digits."""


@triton.jit
def locate_chunk_and_head(program, length, chunks, HEADS: tl.constexpr):
    """
    Return the chunk's number among all rows' chunks, the head, the row, the chunk, and its tokens.

    Tokens are the first one's number among all rows, their indices in the chunk, and whether they exist.
    """
    number, head = program // HEADS, program % HEADS
    row, chunk = number // chunks, number % chunks
    return number, head, row, chunk, locate_tokens(row, chunk, length)


@triton.jit
def locate_tokens(row, chunk, length, SIZE: tl.constexpr = CHUNK_SIZE):
    """Return a chunk's tokens, as `locate_chunk_and_head` does."""
    first, token = row.to(tl.int64) * length + chunk * SIZE, tl.arange(0, SIZE)
    return first, token, chunk * SIZE + token < length


@triton.jit
def load_chunk_document_ids(ids, before, row, chunk, tokens, length):
    """Return documents by token, for the incoming state and for the last token, and the last token's index."""
    first, token, inside = tokens
    own = tl.load(ids + first + token, mask=inside, other=-2)
    end = tl.minimum(length - chunk * CHUNK, CHUNK) - 1
    incoming = tl.where(chunk > 0, load_or_zero(ids + first - 1, chunk > 0), tl.load(before + row))
    return own, incoming, tl.load(ids + first + end), end


@triton.jit
def load_by_token(tensor, tokens, head, HEADS: tl.constexpr):
    """Load a head's number for every token."""
    first, token, inside = tokens
    return load_or_zero(tensor + ((first + token) * HEADS + head), inside)


@triton.jit
def load_tile(tensor, tokens, head, HEADS: tl.constexpr, columns, WIDTH: tl.constexpr):
    """Load tokens by a head's columns (columns,)."""
    first, token, inside = tokens
    at = tensor + head * WIDTH + first * (HEADS * WIDTH) + (token[:, None] * (HEADS * WIDTH) + columns[None, :])
    return load_or_zero(at, mask_tile(inside, columns < WIDTH))


@triton.jit
def load_transposed(tensor, tokens, head, HEADS: tl.constexpr, columns, WIDTH: tl.constexpr):
    """Load `load_tile` transposed: columns by tokens."""
    first, token, inside = tokens
    at = tensor + head * WIDTH + first * (HEADS * WIDTH) + (token[None, :] * (HEADS * WIDTH) + columns[:, None])
    return load_or_zero(at, inside[None, :] & (columns < WIDTH)[:, None])


@triton.jit
def store_tile(tensor, tokens, head, HEADS: tl.constexpr, columns, WIDTH: tl.constexpr, values):
    """Store tokens by a head's columns (columns,)."""
    first, token, inside = tokens
    at = tensor + head * WIDTH + first * (HEADS * WIDTH) + (token[:, None] * (HEADS * WIDTH) + columns[None, :])
    tl.store(at, values, mask=mask_tile(inside, columns < WIDTH))


@triton.jit
def load_state_tile(states, number, k_columns, v_columns, K: tl.constexpr, V: tl.constexpr):
    """Load a tile (k_columns, v_columns) of a state."""
    at = states + number.to(tl.int64) * (K * V) + (k_columns[:, None] * V + v_columns[None, :])
    return load_or_zero(at, mask_tile(k_columns < K, v_columns < V))


@triton.jit
def store_state_tile(states, number, k_columns, v_columns, K: tl.constexpr, V: tl.constexpr, values):
    """Store a tile (k_columns, v_columns) of a state."""
    at = states + number.to(tl.int64) * (K * V) + (k_columns[:, None] * V + v_columns[None, :])
    tl.store(at, values, mask=mask_tile(k_columns < K, v_columns < V))


@triton.jit
def multiply(left, right, PRECISION: tl.constexpr):
    """Return a matrix product, float32."""
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def exp_where(exists, exponents):
    """Return exp of exponents, and 0 elsewhere."""
    return tl.exp(tl.where(exists, exponents, -float("inf")))


@triton.jit
def mask_causal_document_pairs(own, inside):
    """Return the pairs (query, key) within a document, up to the query itself."""
    token = tl.arange(0, CHUNK)
    return (own[:, None] == own[None, :]) & (token[:, None] >= token[None, :]) & inside[:, None]


@triton.jit
def mask_document_pairs_by_key(own, inside):
    """Return the pairs (key, query) within a document, from the key itself on."""
    token = tl.arange(0, CHUNK)
    return (own[:, None] == own[None, :]) & (token[:, None] <= token[None, :]) & inside[:, None]


@triton.jit
def invert_unit_lower_triangular(system, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """
    Invert I + system, for a strictly lower triangular (64, 64), with products in a dtype.

    Blocks with 16 rows on the diagonal are inverted by forward substitution. With D their inverse and B = D times the
    blocks below, the result is (I - B)(I + B^2) D, since B^4 is 0.
    """
    SIZE: tl.constexpr = 16
    COUNT: tl.constexpr = CHUNK // 16
    block, other = tl.arange(0, COUNT)[:, None, None, None], tl.arange(0, COUNT)[None, None, :, None]
    row, column = tl.arange(0, SIZE)[None, :, None], tl.arange(0, SIZE)[None, None, :]
    diagonal = tl.sum(tl.where(block == other, tl.reshape(system, (COUNT, SIZE, COUNT, SIZE)), 0.0), 2)
    solved = tl.where(row == column, 1.0, 0.0) + diagonal * 0.0
    for number in range(SIZE - 1):
        below = tl.sum(tl.where(column == number, diagonal, 0.0), 2)
        done = tl.sum(tl.where(row == number, solved, 0.0), 1)
        solved -= below[:, :, None] * done[:, None, :]
    inverse = tl.reshape(tl.where(block == other, solved[:, :, None, :], 0.0), (CHUNK, CHUNK))
    token = tl.arange(0, CHUNK)
    below = tl.where((token // SIZE)[:, None] > (token // SIZE)[None, :], system, 0.0).to(DTYPE)
    blocks = inverse.to(DTYPE)
    below = multiply(blocks, below, PRECISION).to(DTYPE)
    squared = multiply(below, below, PRECISION).to(DTYPE)
    inverse += multiply(squared, blocks, PRECISION)
    return inverse - multiply(below, inverse.to(DTYPE), PRECISION)


# fmt: off
@cache_launches("length", "chunks")
def solve_chunk_systems(
    k, v, g, beta, ids, before, decays, inverse, keys, written, length, chunks, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # fmt: on
    """Store, by chunk and head, the decay sums, the inverse system, and its products with keys and values."""
    _number, head, row, chunk, tokens = locate_chunk_and_head(tl.program_id(0), length, chunks, HEADS)
    first, token, inside = tokens
    own, incoming, _last, _end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    channel = tl.arange(0, BK)
    by_head = (first + token) * HEADS + head
    factors = load_by_token(beta, tokens, head, HEADS).to(tl.float32)
    key = load_tile(k, tokens, head // GROUPS, HEADS // GROUPS, channel, K)
    gates = tl.maximum(load_by_token(g, tokens, head, HEADS).to(tl.float32), MIN_GATE)
    is_pair = mask_causal_document_pairs(own, inside)
    sums = tl.sum(tl.where(is_pair, gates[None, :], 0.0), 1)
    tl.store(decays + by_head, sums, mask=inside)
    pair_decay = exp_where(is_pair, sums[:, None] - sums[None, :])
    products = multiply(key, tl.trans(key), PRECISION)
    system = tl.where(token[:, None] > token[None, :], factors[:, None] * products * pair_decay, 0.0)
    # With unit keys all numbers are small: float16 has the precision of TF32, and shorter products.
    DTYPE: tl.constexpr = tl.float16 if key.dtype.primitive_bitwidth == 16 else tl.float32
    solved = invert_unit_lower_triangular(system, DTYPE, PRECISION)
    store_tile(inverse, tokens, head, HEADS, token, CHUNK, solved)
    from_state = tl.where(own == incoming, tl.exp(sums), 0.0)
    weighted = (solved * (factors * from_state)[None, :]).to(key.dtype)
    product = multiply(weighted, key, PRECISION)
    store_tile(keys, tokens, head, HEADS, channel, K, product)
    weighted = (solved * factors[None, :]).to(key.dtype)
    for begin in range(0, V, BV):
        column = begin + tl.arange(0, BV)
        values = load_tile(v, tokens, head, HEADS, column, V)
        solution = multiply(weighted, values, PRECISION)
        store_tile(written, tokens, head, HEADS, column, V, solution)


# fmt: off
@cache_launches("length", "chunks")
def multiply_keys_by_inverse(
    k, beta, inverse, decays, ids, before, keys, length, chunks, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Store the inverse systems' products with keys, as `solve_chunk_systems` does."""
    _number, head, row, chunk, tokens = locate_chunk_and_head(tl.program_id(0), length, chunks, HEADS)
    _first, token, _inside = tokens
    own, incoming, _last, _end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    channel = tl.arange(0, BK)
    factors = load_by_token(beta, tokens, head, HEADS).to(tl.float32)
    sums = load_by_token(decays, tokens, head, HEADS)
    key = load_tile(k, tokens, head // GROUPS, HEADS // GROUPS, channel, K)
    solved = load_tile(inverse, tokens, head, HEADS, token, CHUNK).to(tl.float32)
    from_state = tl.where(own == incoming, tl.exp(sums), 0.0)
    weighted = (solved * (factors * from_state)[None, :]).to(key.dtype)
    product = multiply(weighted, key, PRECISION)
    store_tile(keys, tokens, head, HEADS, channel, K, product)


# fmt: off
@cache_launches("length", "chunks")
def carry_states_and_update_written(
    k, keys, written, decays, ids, before, state, states, result, length, chunks, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
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
        first, token, inside = tokens
        end = tl.minimum(length - chunk * CHUNK, CHUNK) - 1
        own = tl.load(ids + first + token, mask=inside, other=-2)
        last = tl.load(ids + first + end)
        sums = load_by_token(decays, tokens, head, HEADS)
        total = tl.load(decays + (first + end) * HEADS + head)
        seen = load_tile(keys, tokens, head, HEADS, channel, K)
        values = load_tile(written, tokens, head, HEADS, column, V).to(tl.float32)
        values -= multiply(seen, narrow, PRECISION)
        store_tile(written, tokens, head, HEADS, column, V, values)
        to_end = exp_where(own == last, total - sums)
        key = load_transposed(k, tokens, head // GROUPS, HEADS // GROUPS, channel, K)
        carried = carried * tl.where(last == incoming, tl.exp(total), 0.0)
        carried += multiply(key, (values * to_end[:, None]).to(key.dtype), PRECISION)
        incoming = last
    if result is not None:
        store_state_tile(result, row * HEADS + head, channel, column, K, V, carried)


# fmt: off
@cache_launches("length", "chunks")
def recompute_states(
    k, written, decays, ids, before, state, states, length, chunks, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Store the state before every chunk in a row, from the written values; a program has a tile (BK, BV)."""
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    row, head, token = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS, tl.arange(0, CHUNK)
    channel = tl.program_id(0) // BLOCKS * BK + tl.arange(0, BK)
    column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    carried = tl.zeros((BK, BV), tl.float32)
    if state is not None:
        carried += load_state_tile(state, row * HEADS + head, channel, column, K, V).to(tl.float32)
    incoming = tl.load(before + row)
    for chunk in range(0, chunks):
        store_state_tile(states, (row * chunks + chunk) * HEADS + head, channel, column, K, V, carried)
        tokens = locate_tokens(row, chunk, length)
        first, token, inside = tokens
        end = tl.minimum(length - chunk * CHUNK, CHUNK) - 1
        own = tl.load(ids + first + token, mask=inside, other=-2)
        last = tl.load(ids + first + end)
        sums = load_by_token(decays, tokens, head, HEADS)
        total = tl.load(decays + (first + end) * HEADS + head)
        to_end = exp_where(own == last, total - sums)
        values = load_tile(written, tokens, head, HEADS, column, V).to(tl.float32)
        key = load_transposed(k, tokens, head // GROUPS, HEADS // GROUPS, channel, K)
        carried = carried * tl.where(last == incoming, tl.exp(total), 0.0)
        carried += multiply(key, (values * to_end[:, None]).to(key.dtype), PRECISION)
        incoming = last


# fmt: off
@cache_launches("length", "chunks")
def compute_results(
    q, k, written, states, decays, ids, before, result, length, chunks, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Store the results for one chunk, head and value block, from the incoming state and the written values."""
    # A program computes the results e Q S + (Q K^T D) N for one chunk, head and block of BV columns.
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    number, head, row, chunk, tokens = locate_chunk_and_head(tl.program_id(0) // BLOCKS, length, chunks, HEADS)
    _first, _token, inside = tokens
    own, incoming, _last, _end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    channel = tl.arange(0, BK)
    column = tl.program_id(0) % BLOCKS * BV + tl.arange(0, BV)
    sums = load_by_token(decays, tokens, head, HEADS)
    query = load_tile(q, tokens, head // GROUPS, HEADS // GROUPS, channel, K)
    key = load_transposed(k, tokens, head // GROUPS, HEADS // GROUPS, channel, K)
    state = load_state_tile(states, number * HEADS + head, channel, column, K, V)
    from_state = tl.where(own == incoming, tl.exp(sums), 0.0)
    mixed = from_state[:, None] * multiply(query, state, PRECISION)
    is_pair = mask_causal_document_pairs(own, inside)
    pair_decay = exp_where(is_pair, sums[:, None] - sums[None, :])
    scores = multiply(query, key, PRECISION) * pair_decay
    values = load_tile(written, tokens, head, HEADS, column, V)
    mixed += multiply(scores.to(values.dtype), values, PRECISION)
    store_tile(result, tokens, head, HEADS, column, V, mixed)


# fmt: off
@cache_launches("length", "chunks")
def compute_gradients_within_chunks(
    grad, q, k, written, decays, ids, grad_written, grad_scores, grad_decays, length, chunks, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # fmt: on
    """
    Store gradients through results in the same chunk: for written values, and, by key and query, for scores without
    decays. Start the decay sums' gradients.
    """
    _number, head, _row, _chunk, tokens = locate_chunk_and_head(tl.program_id(0), length, chunks, HEADS)
    first, token, inside = tokens
    channel = tl.arange(0, BK)
    by_head = (first + token) * HEADS + head
    own = tl.load(ids + first + token, mask=inside, other=-2)
    sums = load_by_token(decays, tokens, head, HEADS)
    query = load_transposed(q, tokens, head // GROUPS, HEADS // GROUPS, channel, K)
    key = load_tile(k, tokens, head // GROUPS, HEADS // GROUPS, channel, K)
    # By key and query: the transpose of the scores.
    pair_decay = exp_where(mask_document_pairs_by_key(own, inside), sums[None, :] - sums[:, None])
    scores = multiply(key, query, PRECISION) * pair_decay
    by_key = tl.zeros((CHUNK, CHUNK), tl.float32)
    for begin in range(0, V, BV):
        column = begin + tl.arange(0, BV)
        grads = load_tile(grad, tokens, head, HEADS, column, V)
        values = load_tile(written, tokens, head, HEADS, column, V)
        product = multiply(scores.to(grads.dtype), grads, PRECISION)
        store_tile(grad_written, tokens, head, HEADS, column, V, product)
        by_key += multiply(values, tl.trans(grads), PRECISION)
    through_pairs = by_key * scores
    tl.store(grad_decays + by_head, tl.sum(through_pairs, 0) - tl.sum(through_pairs, 1), mask=inside)
    by_key *= pair_decay
    store_tile(grad_scores, tokens, head, HEADS, token, CHUNK, by_key)


# fmt: off
@cache_launches("length", "chunks")
def carry_gradients_back(
    grad, grad_last, q, k, keys, decays, ids, before, grad_written, grad_states, grad_state, length, chunks,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
   PRECISION: tl.constexpr,
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
        first, _token, _inside = tokens
        own, incoming, last, end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
        sums = load_by_token(decays, tokens, head, HEADS)
        total = tl.load(decays + (first + end) * HEADS + head)
        to_end = exp_where(own == last, total - sums)
        from_state = tl.where(own == incoming, tl.exp(sums), 0.0)
        key = load_tile(k, tokens, head // GROUPS, HEADS // GROUPS, channel, K)
        values = load_tile(grad_written, tokens, head, HEADS, column, V).to(tl.float32)
        values += to_end[:, None] * multiply(key, narrow, PRECISION)
        store_tile(grad_written, tokens, head, HEADS, column, V, values)
        query = load_transposed(q, tokens, head // GROUPS, HEADS // GROUPS, channel, K)
        seen = load_transposed(keys, tokens, head, HEADS, channel, K)
        grads = load_tile(grad, tokens, head, HEADS, column, V).to(tl.float32)
        carried = carried * tl.where(last == incoming, tl.exp(total), 0.0)
        carried += multiply(query, (from_state[:, None] * grads).to(query.dtype), PRECISION)
        carried -= multiply(seen, values.to(seen.dtype), PRECISION)
    if grad_state is not None:
        store_state_tile(grad_state, row * HEADS + head, channel, column, K, V, carried)


# fmt: off
@cache_launches("length", "chunks")
def compute_system_gradients(
    k, v, beta, inverse, written, grad_written, decays, ids, grad_v, grad_pairs, grad_factors, grad_decays, length,
    chunks, HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """
    Store gradients through the solved systems, for values and for key pairs' products. Start beta's gradients, and add
    to the decay sums'. The right sides' gradients replace the written values'.
    """
    _number, head, _row, _chunk, tokens = locate_chunk_and_head(tl.program_id(0), length, chunks, HEADS)
    first, token, inside = tokens
    channel = tl.arange(0, BK)
    by_head = (first + token) * HEADS + head
    own = tl.load(ids + first + token, mask=inside, other=-2)
    factors = load_by_token(beta, tokens, head, HEADS).to(tl.float32)
    solved = load_transposed(inverse, tokens, head, HEADS, token, CHUNK)
    by_pair = tl.zeros((CHUNK, CHUNK), tl.float32)
    to_factors = tl.zeros((CHUNK,), tl.float32)
    for begin in range(0, V, BV):
        column = begin + tl.arange(0, BV)
        grads = load_tile(grad_written, tokens, head, HEADS, column, V)
        real = load_tile(v, tokens, head, HEADS, column, V)
        wanted = multiply(solved, grads, PRECISION)
        store_tile(grad_v, tokens, head, HEADS, column, V, factors[:, None] * wanted)
        store_tile(grad_written, tokens, head, HEADS, column, V, wanted)
        to_factors += tl.sum(wanted * real.to(tl.float32), 1)
        values = load_tile(written, tokens, head, HEADS, column, V)
        by_pair -= multiply(wanted.to(values.dtype), tl.trans(values), PRECISION)
    sums = load_by_token(decays, tokens, head, HEADS)
    key = load_tile(k, tokens, head // GROUPS, HEADS // GROUPS, channel, K)
    is_pair = mask_causal_document_pairs(own, inside) & (token[:, None] > token[None, :])
    by_pair *= exp_where(is_pair, sums[:, None] - sums[None, :])
    through_pairs = by_pair * multiply(key, tl.trans(key), PRECISION)
    tl.store(grad_factors + by_head, to_factors + tl.sum(through_pairs, 1), mask=inside)
    through_pairs *= factors[:, None]
    grad_sums = load_by_token(grad_decays, tokens, head, HEADS)
    grad_sums += tl.sum(through_pairs, 1) - tl.sum(through_pairs, 0)
    tl.store(grad_decays + by_head, grad_sums, mask=inside)
    by_pair *= factors[:, None]
    store_tile(grad_pairs, tokens, head, HEADS, token, CHUNK, by_pair)


# fmt: off
@cache_launches("length", "chunks")
def compute_query_gradients(
    grad, q, k, states, grad_scores, decays, ids, before, part_decays, grad_q, length, chunks, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # fmt: on
    """
    Store a key head's gradients for BK query channels, and their part in the decay sums' gradients (rows, length,
    parts, heads).
    """
    PARTS: tl.constexpr = (K + BK - 1) // BK
    part = tl.program_id(0) % PARTS
    program = tl.program_id(0) // PARTS
    chunk_number, key_head, row, chunk, tokens = locate_chunk_and_head(program, length, chunks, HEADS // GROUPS)
    first, token, inside = tokens
    own, incoming, _last, _end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    channel = part * BK + tl.arange(0, BK)
    query = load_tile(q, tokens, key_head, HEADS // GROUPS, channel, K)
    key = load_tile(k, tokens, key_head, HEADS // GROUPS, channel, K)
    total = tl.zeros((CHUNK, BK), tl.float32)
    for number in range(GROUPS):
        head = key_head * GROUPS + number
        to_query = tl.zeros((CHUNK, BK), tl.float32)
        for begin in range(0, V, BV):
            column = begin + tl.arange(0, BV)
            state = load_state_tile(states, chunk_number * HEADS + head, channel, column, K, V)
            grads = load_tile(grad, tokens, head, HEADS, column, V)
            to_query += multiply(grads, tl.trans(state), PRECISION)
        sums = load_by_token(decays, tokens, head, HEADS)
        to_query *= tl.where(own == incoming, tl.exp(sums), 0.0)[:, None]
        by_part = ((first + token) * PARTS + part) * HEADS + head
        tl.store(part_decays + by_part, tl.sum(to_query * query.to(tl.float32), 1), mask=inside)
        scores = load_transposed(grad_scores, tokens, head, HEADS, token, CHUNK)
        total += to_query
        total += multiply(scores, key, PRECISION)
    store_tile(grad_q, tokens, key_head, HEADS // GROUPS, channel, K, total)


# fmt: off
@cache_launches("length", "chunks")
def compute_key_gradients(
    q, k, beta, written, states, grad_written, grad_states, grad_scores, grad_pairs, decays, ids, before, part_decays,
    part_factors, grad_k, length, chunks, HEADS: tl.constexpr, GROUPS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """
    Store a value head's gradients for BK key channels, and their part in beta's gradients. Add to their part in the
    decay sums' gradients.
    """
    PARTS: tl.constexpr = (K + BK - 1) // BK
    part = tl.program_id(0) % PARTS
    number, head, row, chunk, tokens = locate_chunk_and_head(tl.program_id(0) // PARTS, length, chunks, HEADS)
    first, token, inside = tokens
    own, incoming, last, end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    channel = part * BK + tl.arange(0, BK)
    through_state, to_key = tl.zeros((CHUNK, BK), tl.float32), tl.zeros((CHUNK, BK), tl.float32)
    along_state = tl.zeros((BK,), tl.float32)
    for begin in range(0, V, BV):
        column = begin + tl.arange(0, BV)
        state = load_state_tile(states, number * HEADS + head, channel, column, K, V)
        grad_state = load_state_tile(grad_states, number * HEADS + head, channel, column, K, V)
        wanted = load_tile(grad_written, tokens, head, HEADS, column, V)
        values = load_tile(written, tokens, head, HEADS, column, V)
        through_state += multiply(wanted, tl.trans(state), PRECISION)
        to_key += multiply(values, tl.trans(grad_state), PRECISION)
        along_state += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 1)
    factors = load_by_token(beta, tokens, head, HEADS).to(tl.float32)
    sums = load_by_token(decays, tokens, head, HEADS)
    total = tl.load(decays + (first + end) * HEADS + head)
    to_end = exp_where(own == last, total - sums)
    from_state = tl.where(own == incoming, tl.exp(sums), 0.0)
    key = load_tile(k, tokens, head // GROUPS, HEADS // GROUPS, channel, K)
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
    pairs = load_tile(grad_pairs, tokens, head, HEADS, token, CHUNK)
    to_key += multiply(pairs, key, PRECISION)
    to_key += multiply(tl.trans(pairs), key, PRECISION)
    query = load_tile(q, tokens, head // GROUPS, HEADS // GROUPS, channel, K)
    scores = load_tile(grad_scores, tokens, head, HEADS, token, CHUNK)
    to_key += multiply(scores, query, PRECISION)
    store_tile(grad_k, tokens, head, HEADS, channel, K, to_key)


# fmt: off
@cache_launches("length", "chunks")
def sum_g_and_beta_gradients_kernel(
    part_decays, part_factors, grad_decays, grad_factors, ids, grad_g, grad_beta, length, chunks, HEADS: tl.constexpr,
    PARTS: tl.constexpr,
):
    # fmt: on
    """Store gates' and beta's gradients: the sums over all parts, and for gates within a document and chunk."""
    _number, head, _row, _chunk, tokens = locate_chunk_and_head(tl.program_id(0), length, chunks, HEADS)
    first, token, inside = tokens
    by_head = (first + token) * HEADS + head
    own = tl.load(ids + first + token, mask=inside, other=-2)
    grad_sums = load_by_token(grad_decays, tokens, head, HEADS)
    to_factors = load_by_token(grad_factors, tokens, head, HEADS)
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
def sum_value_heads_kernel(grad, result, count, GROUPS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, SIZE:
tl.constexpr):
    # fmt: on
    """Store gradients summed over value heads with a common key head."""
    key_head = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    channel, tokens = tl.arange(0, BK), (0, key_head, key_head < count)
    total = tl.zeros((SIZE, BK), tl.float32)
    for number in tl.static_range(GROUPS):
        total += load_tile(grad, tokens, number, GROUPS, channel, K).to(tl.float32)
    store_tile(result, tokens, 0, 1, channel, K, total)


MAX_WIDTH = 256
"""The widest key; values may have any width."""


MIN_BLOCK = 64
"""
Channels in the smallest tile. With 16, an H200 computed wrong results from the second chunk on, and products with
32 columns on eight warps read outside shared memory (Triton 3.6).
"""


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

    q and k (rows, length, key_heads, K), v (rows, length, value_heads, V), g and beta (rows, length, value_heads); the
    state is float32 (rows, value_heads, K, V). In 16 bits, systems are inverted in float16: keys should have unit norm.
    """
    check_floats("delta_rule_triton", q, k, v, g, beta)
    if k.shape[-1] > MAX_WIDTH:
        raise ValueError(f"keys are {k.shape[-1]} wide, and the kernel accepts at most {MAX_WIDTH}")
    return _differentiable_delta_rule(q, k, v, g, beta, *documents, state)  # type: ignore[return-value]


def _allocate_forward(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return results, last states, decay sums, inverse systems and written values."""
    last = v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
    decays, inverse = v.new_empty(v.shape[:3], dtype=torch.float32), v.new_empty(*v.shape[:3], CHUNK_SIZE)
    return v.new_empty(v.shape), last, decays, inverse, v.new_empty(v.shape)


def get_float32_product_precision() -> str:
    """Return tl.dot's precision for float32: "tf32" if torch allows TF32, else "tf32x3"."""
    # Products in full float32 do not use tensor cores, and take minutes to compile here.
    return "tf32" if get_dot_precision() == "tf32" else "tf32x3"


def _count_forward_flops(k: Tensor, v: Tensor) -> float:
    """Return the products' FLOPs, for all tokens and heads."""
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


def _count_forward_scratch_bytes(k: Tensor, v: Tensor) -> int:
    return v.shape[:3].numel() * k.shape[3] * v.itemsize + _count_state_bytes(k, v)


def _count_backward_scratch_bytes(k: Tensor, v: Tensor) -> int:
    """Return the bytes for keys, gradients, states and sums."""
    keys = (1 if k.shape[2] == v.shape[2] else 2) * k.shape[3]
    by_token = (keys + v.shape[3] + 2 * CHUNK_SIZE) * v.itemsize + 8 * (1 + cdiv(k.shape[3], MIN_BLOCK))
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
    sizes = _Sizes.from_keys_and_values(k, v)
    q, k, v, g, beta, ids = (x.contiguous() for x in (q, k, v, g, beta, ids))
    state = None if state is None else state.contiguous()
    keys, states = v.new_empty(*v.shape[:3], sizes.width), sizes.allocate_states(v)
    solve_chunk_systems[(sizes.chunk_head_count,)](
        *(k, v, g, beta, ids, before, decays, inverse, keys, written, sizes.length, sizes.chunks),
        **{**sizes.constants, "BV": sizes.wide_tile_columns},
        num_warps=4,
        **sizes.limit_registers_for_small_tiles(168),
    )
    block = sizes.columns_per_carry_tile
    carry_states_and_update_written[(cdiv(sizes.v_width, block), sizes.rows * sizes.heads)](
        *(k, keys, written, decays, ids, before, state, states, last, sizes.length, sizes.chunks),
        **{**sizes.constants, "BV": block},
        num_warps=4,
        num_stages=(4 if block < MIN_BLOCK else 2) if sizes.fits_several_chunks else 1,
    )
    compute_results[(sizes.chunk_head_count * cdiv(sizes.v_width, MIN_BLOCK),)](
        *(q, k, written, states, decays, ids, before, mixed, sizes.length, sizes.chunks),
        **sizes.constants,
        num_warps=4,
        **sizes.limit_registers_for_small_tiles(128),
    )


class _Sizes(NamedTuple):
    """Sizes in a call, and block sizes for its kernels."""

    rows: int
    length: int
    heads: int
    groups: int
    width: int
    v_width: int
    chunks: int
    itemsize: int
    multiprocessors: int

    @classmethod
    def from_keys_and_values(cls, k: Tensor, v: Tensor) -> "_Sizes":
        rows, length, heads, v_width = v.shape
        groups, chunks = heads // k.shape[2], cdiv(length, CHUNK_SIZE)
        return cls(rows, length, heads, groups, k.shape[3], v_width, chunks, v.itemsize, sm_count(v.device))

    @property
    def fits_several_chunks(self) -> bool:
        """Return whether several chunks' tiles fit into shared memory."""
        return self.itemsize * max(MIN_BLOCK, next_power_of_2(self.width)) <= 256

    @property
    def columns_per_carry_tile(self) -> int:
        """
        Return the columns in a sequential kernel's tile.

        Wide tiles read keys less often, but a few rows need narrow ones to occupy all multiprocessors.
        """
        programs = self.rows * self.heads * cdiv(self.v_width, MIN_BLOCK)
        has_small_tiles = self.itemsize == 2 and self.fits_several_chunks
        return MIN_BLOCK if has_small_tiles and programs >= self.multiprocessors else MIN_BLOCK // 2

    @property
    def wide_tile_columns(self) -> int:
        """Return the columns in a tile where nothing else needs shared memory."""
        return 2 * MIN_BLOCK if self.v_width > MIN_BLOCK and self.fits_several_chunks else MIN_BLOCK

    @property
    def chunk_head_count(self) -> int:
        """Return how many chunks all rows and value heads have."""
        return self.rows * self.chunks * self.heads

    @property
    def key_parts(self) -> int:
        """Return how many parts with MIN_BLOCK channels a key has."""
        return cdiv(self.width, MIN_BLOCK)

    def allocate_states(self, like: Tensor) -> Tensor:
        """Return memory for the states before all chunks (rows, chunks, heads, K, V)."""
        return like.new_empty(self.rows, self.chunks, self.heads, self.width, self.v_width)

    def limit_registers_for_small_tiles(self, count: int) -> dict[str, int]:
        """Return the launch option for at most `count` registers, unless tiles are large and would be spilled."""
        return limit_registers(count) if self.itemsize == 2 and self.fits_several_chunks else {}

    @property
    def constants(self) -> dict[str, Any]:
        """Return the constants for most kernels."""
        return {
            "HEADS": self.heads,
            "GROUPS": self.groups,
            "K": self.width,
            "V": self.v_width,
            "BK": max(MIN_BLOCK, next_power_of_2(self.width)),
            "BV": MIN_BLOCK,
            "PRECISION": get_float32_product_precision(),
        }


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
    if not v.shape[:3].numel():
        if state is not None:
            grads[5].copy_(grad_state)
        return
    sizes = _Sizes.from_keys_and_values(k, v)
    grad, q, k, v, beta, ids = (x.contiguous() for x in (grad, q, k, v, beta, ids))
    keys = v.new_empty(*v.shape[:3], sizes.width)
    grad_k = grads[1] if sizes.groups == 1 else torch.empty_like(keys)
    states, grad_states = (sizes.allocate_states(v) for _ in range(2))
    grad_written, grad_scores, grad_pairs = (torch.empty_like(x) for x in (v, inverse, inverse))
    grad_decays, grad_factors = (torch.empty_like(decays) for _ in range(2))
    part_decays, part_factors = (
        decays.new_empty(sizes.rows, sizes.length, sizes.key_parts, sizes.heads) for _ in range(2)
    )
    state = None if state is None else state.contiguous()
    constants, ends = sizes.constants, (sizes.length, sizes.chunks)
    parts = {**constants, "BK": MIN_BLOCK}
    multiply_keys_by_inverse[(sizes.chunk_head_count,)](
        *(k, beta, inverse, decays, ids, before, keys, *ends),
        **{name: constants[name] for name in ("HEADS", "GROUPS", "K", "BK", "PRECISION")},
        num_warps=4,
    )
    recompute_states[(sizes.key_parts * cdiv(sizes.v_width, MIN_BLOCK), sizes.rows * sizes.heads)](
        *(k, written, decays, ids, before, state, states, *ends), **parts, num_warps=4, num_stages=4
    )
    compute_gradients_within_chunks[(sizes.chunk_head_count,)](
        *(grad, q, k, written, decays, ids, grad_written, grad_scores, grad_decays, *ends),
        **{**constants, "BV": sizes.wide_tile_columns},
        num_warps=4,
        num_stages=2,
        **sizes.limit_registers_for_small_tiles(168),
    )
    block = sizes.columns_per_carry_tile
    carry_gradients_back[(cdiv(sizes.v_width, block), sizes.rows * sizes.heads)](
        *(grad, grad_state.contiguous(), q, k, keys, decays, ids, before, grad_written, grad_states),
        *(grads[5] if state is not None else None, *ends),
        **{**constants, "BV": block},
        num_warps=4 if block < MIN_BLOCK else 8,
        num_stages=3 if sizes.fits_several_chunks else 1,
    )
    compute_system_gradients[(sizes.chunk_head_count,)](
        *(k, v, beta, inverse, written, grad_written, decays, ids, grads[2], grad_pairs, grad_factors, grad_decays),
        *ends,
        **constants,
        num_warps=4,
        num_stages=2,
        **sizes.limit_registers_for_small_tiles(168),
    )
    compute_query_gradients[(sizes.chunk_head_count // sizes.groups * sizes.key_parts,)](
        *(grad, q, k, states, grad_scores, decays, ids, before, part_decays, grads[0], *ends),
        **parts,
        num_warps=4,
        num_stages=3 if sizes.itemsize == 2 else 2,
        **sizes.limit_registers_for_small_tiles(128),
    )
    compute_key_gradients[(sizes.chunk_head_count * sizes.key_parts,)](
        *(q, k, beta, written, states, grad_written, grad_states, grad_scores, grad_pairs, decays, ids, before),
        *(part_decays, part_factors, grad_k, *ends),
        **parts,
        num_warps=4,
        num_stages=1,  # with more, tiles would be overwritten while products read them
        **sizes.limit_registers_for_small_tiles(168),
    )
    sum_g_and_beta_gradients_kernel[(sizes.chunk_head_count,)](
        *(part_decays, part_factors, grad_decays, grad_factors, ids, grads[3], grads[4], *ends),
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


def _sum_over_value_heads(grad: Tensor, summed: Tensor, sizes: _Sizes) -> None:
    """Write summed gradients (rows, length, value_heads, K) over value heads with a common key head."""
    count, block = summed.shape[:3].numel(), next_power_of_2(sizes.width)
    size = max(1, 4096 // block)
    sum_value_heads_kernel[(cdiv(count, size),)](
        grad, summed, count, GROUPS=sizes.groups, K=sizes.width, BK=block, SIZE=size, num_warps=4
    )
