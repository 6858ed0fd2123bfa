"""
The parts of the gated delta rule in Triton that differ if every key channel has a decay; see `gated_delta/triton.py`.

For queries and keys decayed from the incoming state, and keys decayed to the chunk's end, states pass through the same
kernels as with decays by head. Only products of two tokens in a chunk need more: the decays between them differ by
channel. All pairs of tokens whose indices first differ in one bit lie on both sides of borders between halves, where
decays from a border and decays to it are factors for queries and keys. So six products, one per bit, have all pairs,
and no exponent is positive (`channel_delta/eager.py` halves chunks in the same way).

Few decays are as strong as that. From the highest bit on, the first halves with decays above exp(-MAX_EXPONENT) are the
last: there the factors and their inverses have no overflow, and one product has all pairs left. So weak decays take one
or two products, and time depends on decays. Chunks with a border between documents always take six, since otherwise the
rounding in a document would depend on another one.
"""

from typing import NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from drawloom.kernels.triton.chunks import (
    CHUNK,
    MIN_BLOCK,
    MIN_GATE,
    ChunkSizes,
    exp_where,
    invert_unit_lower_triangular,
    load_by_token,
    load_chunk_document_ids,
    load_state_tile,
    load_tile,
    load_transposed,
    locate_chunk_and_head,
    mask_causal_document_pairs,
    mask_document_pairs_by_key,
    multiply,
    multiply_columns,
    store_tile,
    sum_tokens,
)
from drawloom.kernels.triton.primitives import cache_launches, load_float32

MAX_EXPONENT = constexpr(40.0)
"""The largest exponent of a factor: two such factors and a sum over channels fit into bfloat16 and float32."""

MAX_FLOAT16_EXPONENT = constexpr(8.0)
"""The same for float16, in which queries and keys times such factors must fit."""


class DecayedKeys(NamedTuple):
    """
    Queries and keys decayed from the incoming state, keys decayed to the chunk's end, and log decays from the first
    token in a chunk and document, float32; all (rows, length, value_heads, K).
    """

    q: Tensor
    k: Tensor
    k_to_end: Tensor
    sums: Tensor

    @classmethod
    def compute(cls, q: Tensor, k: Tensor, g: Tensor, ids: Tensor, before: Tensor, sizes: ChunkSizes) -> Self:
        """Decay q and k (rows, length, key_heads, K) by g (rows, length, value_heads, K)."""
        decayed_q, decayed_k, k_to_end = (k.new_empty(g.shape) for _ in range(3))
        decayed = cls(decayed_q, decayed_k, k_to_end, g.new_empty(g.shape, dtype=torch.float32))
        _decay_queries_and_keys[(sizes.chunk_head_count * sizes.key_parts,)](
            *(q, k, g.contiguous(), ids, before, *decayed, sizes.length, sizes.chunks),
            **{name: sizes.constants[name] for name in ("HEADS", "GROUPS", "K")},
            BK=MIN_BLOCK,
            **sizes.limit_registers_for_small_tiles(128),
        )
        return decayed


def solve_systems_by_channel(inputs: tuple[Tensor, ...], results: tuple[Tensor, ...], sizes: ChunkSizes) -> None:
    """Fill `results`, see `_solve_chunk_systems`."""
    _solve_chunk_systems[(sizes.chunk_head_count,)](
        *(*inputs, *results, sizes.length, sizes.chunks),
        **{**sizes.constants, "BK": MIN_BLOCK},
        num_stages=1,
    )


def compute_gradients_by_channel(inputs: tuple[Tensor, ...], results: tuple[Tensor, ...], sizes: ChunkSizes) -> None:
    """Fill `results`, see `_compute_gradients`."""
    _compute_gradients[(sizes.chunk_head_count * sizes.key_parts,)](
        *(*inputs, *results, sizes.length, sizes.chunks),
        **{**sizes.constants, "BK": MIN_BLOCK},
        num_warps=8,
        num_stages=1,
    )


# fmt: off
@cache_launches("length", "chunks")
def _decay_queries_and_keys(
    q, k, g, ids, before, decayed_q, decayed_k, k_to_end, sums, length, chunks, HEADS: constexpr,
    GROUPS: constexpr, K: constexpr, BK: constexpr,
):
    # fmt: on
    """Store BK channels of `DecayedKeys`."""
    PARTS: constexpr = (K + BK - 1) // BK
    channel = tl.program_id(0) % PARTS * BK + tl.arange(0, BK)
    _number, head, row, chunk, tokens = locate_chunk_and_head(tl.program_id(0) // PARTS, length, chunks, HEADS)
    head_tokens, key_tokens = tokens + (head, HEADS), tokens + (head // GROUPS, HEADS // GROUPS)
    _first, token, inside = tokens
    own, incoming, last, end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    gates = tl.maximum(load_tile(g, head_tokens, channel, K).to(tl.float32), MIN_GATE)
    decays = sum_tokens(mask_causal_document_pairs(own, inside), gates)
    store_tile(sums, head_tokens, channel, K, decays)
    total = tl.sum(tl.where((token == end)[:, None], decays, 0.0), 0)
    from_state = exp_where((own == incoming)[:, None], decays)
    query = load_tile(q, key_tokens, channel, K).to(tl.float32)
    key = load_tile(k, key_tokens, channel, K).to(tl.float32)
    store_tile(decayed_q, head_tokens, channel, K, query * from_state)
    store_tile(decayed_k, head_tokens, channel, K, key * from_state)
    store_tile(k_to_end, head_tokens, channel, K, key * exp_where((own == last)[:, None], total - decays))


@triton.jit
def _load_border_decays(sums, head_tokens, end, size, is_alone, channel, K: constexpr, DTYPE: constexpr):
    """
    Return factors from and to the border between a token's halves with `size` tokens, the pairs, and the next size.

    The next size is 0 if all decays in the halves are above exp(-LIMIT): then these factors serve pairs in a half, too.
    """
    LIMIT: constexpr = MAX_FLOAT16_EXPONENT if tl.float16 == DTYPE else MAX_EXPONENT
    first, token, _inside, head, HEADS = head_tokens
    border = (token | (2 * size - 1)) - size  # the first half's last token
    exponents = load_tile(sums, head_tokens, channel, K)
    exponents -= load_tile(sums, (first, border, border <= end, head, HEADS), channel, K)
    different = token[:, None] ^ token[None, :]
    is_last = is_alone & (tl.max(tl.max(tl.abs(exponents), 1), 0) <= LIMIT)
    least, next_size = tl.where(is_last, 1, size), tl.where(is_last, 0, size // 2)
    # Factors of tokens without a pair do not count, and are finite.
    from_border, to_border = tl.exp(tl.minimum(exponents, LIMIT)), tl.exp(tl.minimum(-exponents, LIMIT))
    return from_border, to_border, (different >= least) & (different < 2 * size), next_size


# fmt: off
@cache_launches("length", "chunks")
def _solve_chunk_systems(
    q, k, v, beta, ids, before, decayed_k, sums, scores, inverse, keys, written, length, chunks, HEADS: constexpr,
    GROUPS: constexpr, K: constexpr, V: constexpr, BK: constexpr, BV: constexpr,
    PRECISION: constexpr,
):
    # fmt: on
    """Store, by chunk and head, decayed scores, the inverse system, and its products with keys and values."""
    _number, head, row, chunk, tokens = locate_chunk_and_head(tl.program_id(0), length, chunks, HEADS)
    head_tokens, key_tokens = tokens + (head, HEADS), tokens + (head // GROUPS, HEADS // GROUPS)
    first, token, inside = tokens
    own, _incoming, last, end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    is_alone = tl.load(ids + first) == last
    by_query, by_key = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
    for begin in range(0, K, BK):
        channel = begin + tl.arange(0, BK)
        size = CHUNK // 2
        while size > 0:
            from_border, to_border, is_pair, size = _load_border_decays(
                sums, head_tokens, end, size, is_alone, channel, K, k.dtype.element_ty
            )
            key = load_tile(k, key_tokens, channel, K).to(tl.float32)
            near = tl.trans((key * to_border).to(k.dtype.element_ty))
            product = multiply((key * from_border).to(k.dtype.element_ty), near, PRECISION)
            by_key += tl.where(is_pair, product, 0.0)
            query = load_tile(q, key_tokens, channel, K).to(tl.float32)
            product = multiply((query * from_border).to(k.dtype.element_ty), near, PRECISION)
            by_query += tl.where(is_pair, product, 0.0)
        # A token's own query and key meet without a decay.
        query = load_tile(q, key_tokens, channel, K).to(tl.float32)
        key = load_tile(k, key_tokens, channel, K).to(tl.float32)
        by_query += tl.where(token[:, None] == token[None, :], tl.sum(query * key, 1)[:, None], 0.0)
    is_pair = mask_causal_document_pairs(own, inside)
    store_tile(scores, head_tokens, token, CHUNK, tl.where(is_pair, by_query, 0.0))
    factors = load_by_token(beta, head_tokens).to(tl.float32)
    system = tl.where(is_pair & (token[:, None] > token[None, :]), factors[:, None] * by_key, 0.0)
    DTYPE: constexpr = tl.float16 if k.dtype.element_ty.primitive_bitwidth == 16 else tl.float32
    solved = invert_unit_lower_triangular(system, DTYPE, PRECISION)
    store_tile(inverse, head_tokens, token, CHUNK, solved)
    weighted = (solved * factors[None, :]).to(k.dtype.element_ty)
    multiply_columns(weighted, decayed_k, keys, head_tokens, K, BK, PRECISION)
    multiply_columns(weighted, v, written, head_tokens, V, BV, PRECISION)


# fmt: off
@cache_launches("length", "chunks")
def _compute_gradients(
    grad, q, k, beta, written, states, grad_written, grad_states, grad_scores, grad_pairs, sums, ids, before, grad_q,
    grad_k, grad_g, part_factors, length, chunks, HEADS: constexpr, GROUPS: constexpr, K: constexpr,
    V: constexpr, BK: constexpr, BV: constexpr, PRECISION: constexpr,
):
    # fmt: on
    """Store a value head's gradients for BK channels in queries, keys and gates, and their part in beta's gradients."""
    PARTS: constexpr = (K + BK - 1) // BK
    part = tl.program_id(0) % PARTS
    number, head, row, chunk, tokens = locate_chunk_and_head(tl.program_id(0) // PARTS, length, chunks, HEADS)
    head_tokens, key_tokens = tokens + (head, HEADS), tokens + (head // GROUPS, HEADS // GROUPS)
    first, token, inside = tokens
    own, incoming, last, end = load_chunk_document_ids(ids, before, row, chunk, tokens, length)
    is_alone = tl.load(ids + first) == last
    channel = part * BK + tl.arange(0, BK)
    to_query, from_end = tl.zeros((CHUNK, BK), tl.float32), tl.zeros((CHUNK, BK), tl.float32)
    from_start, along_state = tl.zeros((CHUNK, BK), tl.float32), tl.zeros((BK,), tl.float32)
    for begin in range(0, V, BV):
        column = begin + tl.arange(0, BV)
        state = load_state_tile(states, number * HEADS + head, channel, column, K, V)
        grad_state = load_state_tile(grad_states, number * HEADS + head, channel, column, K, V)
        grads = load_tile(grad, head_tokens, column, V)
        wanted = load_tile(grad_written, head_tokens, column, V)
        values = load_tile(written, head_tokens, column, V)
        to_query += multiply(grads, tl.trans(state), PRECISION)
        from_start += multiply(wanted, tl.trans(state), PRECISION)
        from_end += multiply(values, tl.trans(grad_state), PRECISION)
        along_state += tl.sum(state.to(tl.float32) * grad_state.to(tl.float32), 1)
    decays = load_tile(sums, head_tokens, channel, K)
    key = load_tile(k, key_tokens, channel, K)
    total = tl.load(sums + (((first + end) * HEADS + head) * K + channel), mask=channel < K, other=0.0)
    from_state = exp_where((own == incoming)[:, None], decays)
    to_query *= from_state
    # Gradients for keys as rows in systems, whose decays begin before them, and for keys whose decays end after them.
    from_start *= -from_state
    from_end *= exp_where((own == last)[:, None], total - decays)
    at_end = tl.sum(from_end * key.to(tl.float32), 0)
    at_end += tl.where(last == incoming, tl.exp(total), 0.0) * along_state
    factors = load_by_token(beta, head_tokens).to(tl.float32)
    size = CHUNK // 2
    while size > 0:
        # Tiles are loaded again for every size, of which there are few: between, registers have better use.
        from_border, to_border, is_pair, size = _load_border_decays(
            sums, head_tokens, end, size, is_alone, channel, K, k.dtype.element_ty
        )
        key = load_tile(k, key_tokens, channel, K)
        near = (key.to(tl.float32) * to_border).to(key.dtype)
        pairs = load_transposed(grad_scores, head_tokens, token, CHUNK)
        to_query += from_border * multiply(tl.where(is_pair, pairs, 0.0).to(key.dtype), near, PRECISION)
        # Gradients for a token's system, without its beta; and for those of later tokens.
        pairs = load_tile(grad_pairs, head_tokens, token, CHUNK)
        from_start += from_border * multiply(tl.where(is_pair, pairs, 0.0).to(key.dtype), near, PRECISION)
        pairs = load_transposed(grad_pairs, head_tokens, token, CHUNK).to(tl.float32) * factors[None, :]
        near = (key.to(tl.float32) * from_border).to(key.dtype)
        through_pairs = multiply(tl.where(is_pair, pairs, 0.0).to(key.dtype), near, PRECISION)
        query = load_tile(q, key_tokens, channel, K)
        near = (query.to(tl.float32) * from_border).to(key.dtype)
        pairs = load_tile(grad_scores, head_tokens, token, CHUNK)
        through_pairs += multiply(tl.where(is_pair, pairs, 0.0).to(key.dtype), near, PRECISION)
        from_end += to_border * through_pairs
    query = load_tile(q, key_tokens, channel, K).to(tl.float32)
    key = load_tile(k, key_tokens, channel, K).to(tl.float32)
    along = tl.sum(from_start * key, 1)
    tl.store(part_factors + ((first + token) * PARTS + part) * HEADS + head, along, mask=inside)
    from_start *= factors[:, None]
    grad_sums = query * to_query + key * (from_start - from_end)
    grad_sums += tl.where((token == end)[:, None], at_end[None, :], 0.0)
    grad_gates = sum_tokens(mask_document_pairs_by_key(own, inside), grad_sums)
    store_tile(grad_g, head_tokens, channel, K, grad_gates)
    # A token's own query and key meet without a decay.
    itself = grad_scores + ((first + token) * HEADS + head) * CHUNK + token
    to_itself = load_float32(itself, inside)[:, None]
    store_tile(grad_q, head_tokens, channel, K, to_query + to_itself * key)
    store_tile(grad_k, head_tokens, channel, K, from_start + from_end + to_itself * query)
