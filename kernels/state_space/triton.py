"""
Mamba-2's recurrence in Triton, in chunks with 64 tokens; see `kernels/gated_delta/triton.py` for its tiles and limits.

A kernel carries the state from chunk to chunk, and the state's gradient from the last chunk to the first. A second one
computes results, and two more all gradients, by chunk, for all value heads with a common key head: for these heads,
queries are multiplied by keys once, and so are the gradients. States are computed again in the backward pass; storing
and loading them is half the traffic.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from drawloom.kernels.documents import RecurrentDocuments
from drawloom.kernels.operation import make_differentiable, register_kernel
from drawloom.kernels.state_space.eager import state_space_eager
from drawloom.kernels.triton.chunks import (
    CHUNK,
    CHUNK_SIZE,
    MIN_BLOCK,
    MIN_GATE,
    ChunkSizes,
    carry_states,
    exp_where,
    load_by_token,
    load_chunk_document_ids,
    load_state_tile,
    load_tile,
    load_transposed,
    locate_chunk_and_head,
    locate_tokens,
    mask_causal_document_pairs,
    mask_document_pairs_by_key,
    multiply,
    store_tile,
)
from drawloom.kernels.triton.primitives import cache_launches, cdiv, check_floats

MAX_WIDTH = 128
"""The widest keys in Triton; with wider ones, a program's gradients do not fit into registers."""


def state_space_triton(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, documents: RecurrentDocuments, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """
    Compute state_space_eager for float32, bfloat16 and float16; for keys wider than MAX_WIDTH, by itself.

    q and k (rows, length, key_heads, K), v (rows, length, value_heads, V), g (rows, length, value_heads); the state is
    float32 (rows, value_heads, K, V). Products' factors have k's dtype.
    """
    check_floats("state_space_triton", q, k, v, g)
    if k.shape[-1] > MAX_WIDTH:
        return state_space_eager(q, k, v, g, documents, state)
    return _differentiable_state_space(q, k, v, g, *documents, state)


@cache_launches("length", "chunks")
def sum_gates(g, ids, decays, length, chunks, HEADS: constexpr, BLOCK: constexpr):
    """Store gates' sums, log decays by head, from the first token in a chunk and document."""
    tokens = locate_tokens(tl.program_id(0) // chunks, tl.program_id(0) % chunks, length)
    first, token, inside = tokens
    own = tl.load(ids + first + token, mask=inside, other=-2)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gates = tl.maximum(load_tile(g, (first, token, inside, 0, 1), heads, HEADS).to(tl.float32), MIN_GATE)
    sums = multiply(mask_causal_document_pairs(own, inside).to(tl.float32), gates, "tf32x3")
    store_tile(decays, (first, token, inside, 0, 1), heads, HEADS, sums)


# fmt: off
@cache_launches("length", "chunks")
def mix_values(
    q, k, v, states, decays, ids, before, result, length, chunks, HEADS: constexpr, GROUPS: constexpr,
    K: constexpr, V: constexpr, BK: constexpr, BV: constexpr, PRECISION: constexpr,
):
    # fmt: on
    """Store a chunk's results for all value heads with a common key head."""
    number, key_head, row, chunk, tokens = locate_chunk_and_head(tl.program_id(0), length, chunks, HEADS // GROUPS)
    key_tokens = tokens + (key_head, HEADS // GROUPS)
    _first, _token, inside = tokens
    own, incoming, _last, _end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    channel = tl.arange(0, BK)
    query = load_tile(q, key_tokens, channel, K)
    scores = multiply(query, load_transposed(k, key_tokens, channel, K), PRECISION)
    is_pair = mask_causal_document_pairs(own, inside)
    for head in range(key_head * GROUPS, (key_head + 1) * GROUPS):
        head_tokens = tokens + (head, HEADS)
        sums = load_by_token(decays, head_tokens)
        weights = (scores * exp_where(is_pair, sums[:, None] - sums[None, :])).to(query.dtype)
        for begin in tl.static_range(0, V, BV):
            column = begin + tl.arange(0, BV)
            state = load_state_tile(states, number * HEADS + head, channel, column, K, V)
            values = load_tile(v, head_tokens, column, V).to(query.dtype)
            mixed = exp_where(own == incoming, sums)[:, None] * multiply(query, state, PRECISION)
            mixed = tl.dot(weights, values, mixed, input_precision=PRECISION)
            store_tile(result, head_tokens, column, V, mixed)


# fmt: off
@cache_launches("length", "chunks")
def compute_value_gradients(
    grad, q, k, v, grad_states, decays, ids, before, grad_v, grad_sums, length, chunks, HEADS: constexpr,
    GROUPS: constexpr, K: constexpr, V: constexpr, BK: constexpr, BV: constexpr,
    PRECISION: constexpr,
):
    # fmt: on
    """Store a chunk's gradients for values, and their part in the gradients for gates' sums."""
    number, key_head, row, chunk, tokens = locate_chunk_and_head(tl.program_id(0), length, chunks, HEADS // GROUPS)
    key_tokens = tokens + (key_head, HEADS // GROUPS)
    first, token, inside = tokens
    own, _incoming, last, end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    channel = tl.arange(0, BK)
    key = load_tile(k, key_tokens, channel, K)
    scores = multiply(key, load_transposed(q, key_tokens, channel, K), PRECISION)  # by key and query
    is_pair = mask_document_pairs_by_key(own, inside)
    for head in range(key_head * GROUPS, (key_head + 1) * GROUPS):
        head_tokens = tokens + (head, HEADS)
        sums, total = load_by_token(decays, head_tokens), tl.load(decays + (first + end) * HEADS + head)
        weights = (scores * exp_where(is_pair, sums[None, :] - sums[:, None])).to(key.dtype)
        to_sums = tl.zeros((CHUNK,), tl.float32)
        for begin in tl.static_range(0, V, BV):
            column = begin + tl.arange(0, BV)
            values = load_tile(v, head_tokens, column, V).to(tl.float32)
            grads = load_tile(grad, head_tokens, column, V).to(key.dtype)
            grad_state = load_state_tile(grad_states, number * HEADS + head, channel, column, K, V)
            through_state = exp_where(own == last, total - sums)[:, None] * multiply(key, grad_state, PRECISION)
            to_sums += tl.where(token == end, tl.sum(tl.sum(through_state * values, 1), 0), 0.0)
            to_values = tl.dot(weights, grads, through_state, input_precision=PRECISION)
            store_tile(grad_v, head_tokens, column, V, to_values)
            to_sums -= tl.sum(to_values * values, 1)
        tl.store(grad_sums + (first + token) * HEADS + head, to_sums, mask=inside)


# fmt: off
@cache_launches("length", "chunks")
def compute_other_gradients(
    grad, q, k, v, states, grad_states, decays, ids, before, grad_sums, pairs, grad_q, grad_k, grad_g, length, chunks,
    HEADS: constexpr, GROUPS: constexpr, K: constexpr, V: constexpr, BK: constexpr, BV: constexpr,
    PRECISION: constexpr,
):
    # fmt: on
    """Store a chunk's gradients for a key head's queries and keys, and for gates."""
    number, key_head, row, chunk, tokens = locate_chunk_and_head(tl.program_id(0), length, chunks, HEADS // GROUPS)
    key_tokens = tokens + (key_head, HEADS // GROUPS)
    first, token, inside = tokens
    own, incoming, last, end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    channel = tl.arange(0, BK)
    query = load_tile(q, key_tokens, channel, K)
    key = load_tile(k, key_tokens, channel, K)
    scores = multiply(query, load_transposed(k, key_tokens, channel, K), PRECISION)
    is_pair, by_query = mask_causal_document_pairs(own, inside), tl.zeros((CHUNK, CHUNK), tl.float32)
    to_queries, to_keys = tl.zeros((CHUNK, BK), tl.float32), tl.zeros((CHUNK, BK), tl.float32)
    for head in range(key_head * GROUPS, (key_head + 1) * GROUPS):
        head_tokens = tokens + (head, HEADS)
        sums, total = load_by_token(decays, head_tokens), tl.load(decays + (first + end) * HEADS + head)
        from_state, to_end = exp_where(own == incoming, sums), exp_where(own == last, total - sums)
        to_sums = load_by_token(grad_sums, head_tokens)
        for begin in tl.static_range(0, V, BV):
            column = begin + tl.arange(0, BV)
            values = load_tile(v, head_tokens, column, V).to(key.dtype)
            grads = load_tile(grad, head_tokens, column, V).to(key.dtype)
            state = load_state_tile(states, number * HEADS + head, channel, column, K, V)
            grad_state = load_state_tile(grad_states, number * HEADS + head, channel, column, K, V)
            along_state = tl.sum(tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 1), 0)
            to_sums += tl.where((token == end) & (last == incoming), tl.exp(total) * along_state, 0.0)
            to_pairs = multiply(grads, tl.trans(values), PRECISION) * exp_where(is_pair, sums[:, None] - sums[None, :])
            by_query += to_pairs
            to_sums += tl.sum(to_pairs * scores, 1)
            to_sums += from_state * tl.sum(multiply(query, state, PRECISION) * grads.to(tl.float32), 1)
            weighted = (grads.to(tl.float32) * from_state[:, None]).to(key.dtype)
            to_queries = tl.dot(weighted, tl.trans(state), to_queries, input_precision=PRECISION)
            weighted = (values.to(tl.float32) * to_end[:, None]).to(key.dtype)
            to_keys = tl.dot(weighted, tl.trans(grad_state), to_keys, input_precision=PRECISION)
        to_gates = tl.sum(tl.where(is_pair, to_sums[:, None], 0.0), 0)
        tl.store(grad_g + (first + token) * HEADS + head, to_gates, mask=inside)
    # Stored and loaded, because products with transposes of accumulated tiles are wrong on Hopper.
    store_tile(pairs, key_tokens, token, CHUNK, by_query)
    to_queries = tl.dot(by_query.to(key.dtype), key, to_queries, input_precision=PRECISION)
    store_tile(grad_q, key_tokens, channel, K, to_queries)
    tl.debug_barrier()
    by_key = load_transposed(pairs, key_tokens, token, CHUNK)
    to_keys = tl.dot(by_key, query, to_keys, input_precision=PRECISION)
    store_tile(grad_k, key_tokens, channel, K, to_keys)


def _allocate_forward(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return results and last states."""
    last = v.new_empty(v.shape[0], v.shape[2], k.shape[3], v.shape[3], dtype=torch.float32)
    return v.new_empty(v.shape), last


def _count_forward_flops(k: Tensor, v: Tensor) -> float:
    """Return the products' FLOPs, for all tokens and heads."""
    by_head = 4 * k.shape[3] * v.shape[3] + 2 * CHUNK_SIZE * v.shape[3]
    return k.shape[0] * k.shape[1] * (v.shape[2] * by_head + k.shape[2] * 2 * CHUNK_SIZE * k.shape[3])


def _count_backward_flops(k: Tensor, v: Tensor) -> float:
    """Return the backward pass's FLOPs; it computes states again."""
    by_head = 10 * k.shape[3] * v.shape[3] + 6 * CHUNK_SIZE * v.shape[3]
    return k.shape[0] * k.shape[1] * (v.shape[2] * by_head + k.shape[2] * 6 * CHUNK_SIZE * k.shape[3])


def _count_state_bytes(k: Tensor, v: Tensor) -> int:
    """Return the bytes for the states before all chunks, and for gates' sums."""
    states = cdiv(v.shape[1], CHUNK_SIZE) * v.shape[0] * v.shape[2] * k.shape[3] * v.shape[3] * k.itemsize
    return states + v.shape[:3].numel() * 4


@register_kernel("state_space", _allocate_forward, flops=_count_forward_flops, scratch=_count_state_bytes)
def _forward(
    results: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    ids: Tensor,
    before: Tensor,
    state: Tensor | None,
) -> None:
    """
    Fill the results (like v) and the last states; `ids` and `before` are `RecurrentDocuments`, `state` is the incoming
    state, or None for zeros.
    """
    mixed, last = results
    if not v.shape[:3].numel():
        last.zero_() if state is None else last.copy_(state)
        return
    q, k, v, g, ids = (x.contiguous() for x in (q, k, v, g, ids))
    sizes = ChunkSizes.from_keys_and_values(k, v)
    decays = _sum_gates(g, ids)
    states = _carry(k, v, decays, ids, before, state, last, back=False)
    mix_values[(sizes.chunk_head_count // sizes.groups,)](
        *(q, k, v, states, decays, ids, before, mixed, sizes.length, sizes.chunks),
        **sizes.constants,
        num_stages=max(1, 4 - cdiv(sizes.v_width, MIN_BLOCK)),  # every column block adds tiles to shared memory
    )


def _sum_gates(g: Tensor, ids: Tensor) -> Tensor:
    """Return gates' sums, float32 (rows, length, value_heads)."""
    rows, length, heads = g.shape
    decays, chunks = torch.empty_like(g, dtype=torch.float32), cdiv(length, CHUNK_SIZE)
    sum_gates[(rows * chunks, cdiv(heads, MIN_BLOCK))](
        g, ids, decays, length, chunks, HEADS=heads, BLOCK=MIN_BLOCK
    )
    return decays


def _carry(
    k: Tensor,
    v: Tensor,
    decays: Tensor,
    ids: Tensor,
    before: Tensor,
    state: Tensor | None,
    last: Tensor | None,
    back: bool,
) -> Tensor:
    """Return states (rows, chunks, heads, K, V) in k's dtype, and write the last one; see `carry_states`."""
    sizes = ChunkSizes.from_keys_and_values(k, v)
    states = sizes.allocate_states(k)
    state = None if state is None else state.contiguous()
    carry_states[(cdiv(sizes.v_width, MIN_BLOCK), sizes.rows * sizes.heads)](
        *(k, v, decays, ids, before, state, states, last, sizes.length, sizes.chunks),
        **sizes.constants,
        BY_CHANNEL=False,
        BACK=back,
        num_stages=4 if k.itemsize == 2 else 2,
    )
    return states


@register_kernel(
    "state_space_backward",
    lambda grad_state, q, k, v, g, state: (
        *(x.new_empty(x.shape) for x in (q, k, v, g)),
        grad_state.new_empty(grad_state.shape if state is not None else 0),
    ),
    flops=_count_backward_flops,
    scratch=lambda k, v: 2 * _count_state_bytes(k, v) + k.shape[:3].numel() * CHUNK_SIZE * k.itemsize,
)
def _backward(
    grads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    grad: Tensor,
    grad_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    ids: Tensor,
    before: Tensor,
    state: Tensor | None,
) -> None:
    *others, grad_first = grads
    if not v.shape[:3].numel():
        if state is not None:
            grad_first.copy_(grad_state)
        return
    grad, q, k, v, g, ids = (x.contiguous() for x in (grad, q, k, v, g, ids))
    decays = _sum_gates(g, ids)
    states = _carry(k, v, decays, ids, before, state, None, back=False)
    grad_states = _carry(q, grad, decays, ids, before, grad_state, None if state is None else grad_first, back=True)
    sizes = ChunkSizes.from_keys_and_values(k, v)
    programs, constants, ends = sizes.chunk_head_count // sizes.groups, sizes.constants, (sizes.length, sizes.chunks)
    (*grad_keys, grad_v, grad_g), grad_sums = others, torch.empty_like(decays)
    pairs = k.new_empty(*k.shape[:3], CHUNK_SIZE)
    compute_value_gradients[(programs,)](
        *(grad, q, k, v, grad_states, decays, ids, before, grad_v, grad_sums, *ends),
        **constants,
        num_stages=max(1, 3 - cdiv(sizes.v_width, MIN_BLOCK)),
    )
    compute_other_gradients[(programs,)](
        *(grad, q, k, v, states, grad_states, decays, ids, before, grad_sums, pairs, *grad_keys, grad_g, *ends),
        **constants,
        num_warps=8,
        num_stages=1,  # a tile is an operand of products, and read by other operations
    )


def _compute_gradients(*arguments: Tensor) -> tuple[Tensor | None, ...]:
    *grads, grad_state = _backward(*arguments)
    return *grads, None, None, grad_state


_differentiable_state_space = make_differentiable(_forward, _compute_gradients, results=2)
"""Mamba-2's recurrence; saves its inputs."""
