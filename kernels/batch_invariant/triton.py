"""
Attention whose result for a query has the same bits in every batch, at every length and with a cache, in Triton.

A program has some queries for the heads sharing keys, and adds up blocks of keys, aligned by position, in ascending
order, with the online softmax of Milakov and Gimelshein 2018, arXiv 1805.02867. A query's bits do not depend on how
many rows, queries and keys there are, and a hidden key changes no bit. There is no backward kernel: another
implementation differentiates, from the same inputs.
"""

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from triton.language import constexpr

from drawloom.kernels.attention.eager import AttentionImplementation, attention_flops, attention_on_meta
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions
from drawloom.kernels.operation import once_differentiable, register_kernel
from drawloom.kernels.triton.primitives import (
    cache_launches,
    cdiv,
    check_floats,
    contiguous_last_dim,
    load_or_zero,
    next_power_of_2,
)

QUERIES, NEW_QUERIES = 64, 16
"""A tile's rows, for all heads in a group; few new tokens have the smaller tile, with the same bits."""

UNIT = constexpr(2.0**24)
"""Weights are added up as integers in these units: sums of floats depend on their order, which the tile determines."""

MAX_CHANNEL_BYTES = 512
"""A key's bytes up to which two blocks with 64 keys and values fit into shared memory; wider keys have 32."""

MASKED = constexpr(-1e38)
"""A hidden key's score: its weight is 0 beside any other key, and scores differ by finite numbers."""


class BlockMask(NamedTuple):
    """
    Causal mask within documents, int64 (rows, length), or within whole rows, and the last `window` tokens.

    `learned` is the differentiating implementation's mask; None without gradients, as with a cache. With `key_count`,
    int64 () on the device, the text has only so many of the keys.
    """

    documents: Tensor | None
    window: int | None
    learned: Any = None
    key_count: Tensor | None = None


def create_block_attention(gradient_implementation: AttentionImplementation) -> AttentionImplementation:
    """Return attention in blocks, with another implementation's gradients."""

    def create_mask(documents: Tensor, window: int | None = None, queries: Tensor | None = None) -> BlockMask:
        if queries is not None:
            raise ValueError("attention in blocks has the queries of whole rows")
        return BlockMask(documents, window, gradient_implementation.mask(documents, window))

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: BlockMask,
        options: AttentionOptions = PLAIN_ATTENTION,
        sinks: Tensor | None = None,
    ) -> Tensor:
        if q.is_meta:
            return attention_on_meta(q, k, v, sinks=sinks)
        result: Tensor = _BlockAttention.apply(q, k, v, sinks, mask, options, gradient_implementation)  # type: ignore[no-untyped-call]
        return result

    whole = gradient_implementation.one_document_mask
    return AttentionImplementation(create_mask, attend, None if whole is None else BlockMask(None, None, whole))


class _BlockAttention(Function):
    """Attention in blocks that saves its inputs; the backward pass computes attention again, by another kernel."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        mask: BlockMask,
        options: AttentionOptions,
        gradient_implementation: AttentionImplementation,
    ) -> Tensor:
        """Return (rows, length, heads, v_dim), for q (rows, length, heads, head_dim) and as many keys and values."""
        ctx.save_for_backward(q, k, v, sinks)
        ctx.mask, ctx.options, ctx.attend = mask, options, gradient_implementation.attend
        return attend_in_blocks_triton(q, k, v, mask, options, sinks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [None if x is None else x.detach().requires_grad_() for x in ctx.saved_tensors]
        q, k, v, sinks = inputs
        with torch.enable_grad():
            mixed = ctx.attend(q, k, v, ctx.mask.learned, ctx.options, sinks)
        grads = torch.autograd.grad(mixed, [x for x in inputs if x is not None], grad)
        return *grads, *(None,) * (7 - len(grads))


def attend_in_blocks_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    options: AttentionOptions = PLAIN_ATTENTION,
    sinks: Tensor | None = None,
) -> Tensor:
    """
    Return (rows, length, heads, v_dim) in q's dtype, for the last `length` of all tokens; without gradients.

    q (rows, length, heads, head_dim), k (rows, keys, kv_heads, head_dim), v (rows, keys, kv_heads, v_dim), sinks
    (heads,).
    """
    check_floats("attend_in_blocks_triton", q, k, v)
    scale, softcap = options.scale_for(q.shape[-1]), options.softcap or 0.0
    return _attend(q, k, v, mask.documents, sinks, mask.key_count, mask.window or 0, scale, softcap)


@register_kernel(
    "block_attention",
    lambda q, v: q.new_empty(*q.shape[:3], v.shape[3]),
    flops=lambda q, k, v: attention_flops(q.shape[:3].numel() * k.shape[1], q.shape[3], v.shape[3]),
)
def _attend(
    result: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    sinks: Tensor | None,
    key_count: Tensor | None,
    window: int,
    scale: float,
    softcap: float,
) -> None:
    """
    Fill `attend_in_blocks_triton`'s result, for the mask's documents, int64 (rows, length), and key_count, int64 (), if
    any. A window or softcap of 0 is none.
    """
    if not result.numel():
        return
    q, k, v = (contiguous_last_dim(x) for x in (q, k, v))
    (rows, length, heads, head_dim), keys, kv_heads, v_dim = q.shape, k.shape[1], k.shape[2], v.shape[3]
    group, head_block, v_block = heads // kv_heads, max(16, next_power_of_2(head_dim)), max(16, next_power_of_2(v_dim))
    is_wide = max(head_block, v_block) * q.itemsize > MAX_CHANNEL_BYTES
    # A tile's rows are queries of all heads that share keys: `group` rows per token.
    tile = NEW_QUERIES if length * group <= NEW_QUERIES else QUERIES
    _block_attention_kernel[(cdiv(length * group, tile), rows * kv_heads)](
        q,
        k,
        v,
        None if documents is None else documents.contiguous(),
        None if sinks is None else sinks.contiguous(),
        key_count,
        result,
        length,
        keys,
        window,
        scale,
        softcap,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        HEADS=kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        V_DIM=v_dim,
        HEAD_BLOCK=head_block,
        V_BLOCK=v_block,
        CAPPED=softcap > 0,
        QUERIES=tile,
        KEYS=32 if is_wide else 64,
        num_stages=1 if is_wide else 2,
    )


# fmt: off
@cache_launches("length", "keys", "window")
def _block_attention_kernel(
    q, k, v, documents, sinks, key_count, result, length, keys, window, scale, softcap,
    q_row, q_position, q_head, k_row, k_position, k_head, v_row, v_position, v_head,
    HEADS: constexpr, GROUP: constexpr, HEAD_DIM: constexpr, V_DIM: constexpr,
    HEAD_BLOCK: constexpr, V_BLOCK: constexpr, CAPPED: constexpr,
    QUERIES: constexpr, KEYS: constexpr,
):
    # fmt: on
    if key_count is not None:
        keys = tl.load(key_count).to(tl.int32)
    tile = tl.program_id(0)
    row, head = (tl.program_id(1) // HEADS).to(tl.int64), (tl.program_id(1) % HEADS).to(tl.int64)
    index = tile * QUERIES + tl.arange(0, QUERIES)
    query, query_head = index // GROUP, head * GROUP + index % GROUP
    position = query + keys - length
    channel, v_channel = tl.arange(0, HEAD_BLOCK)[None, :], tl.arange(0, V_BLOCK)[None, :]
    inside = query < length
    query_at = q + row * q_row + query.to(tl.int64)[:, None] * q_position + query_head[:, None] * q_head + channel
    queries = load_or_zero(query_at, inside[:, None] & (channel < HEAD_DIM))
    largest = tl.full((QUERIES,), MASKED, tl.float32)
    total = tl.zeros((QUERIES,), tl.float32)
    if sinks is not None:
        largest = tl.load(sinks + query_head).to(tl.float32)
        total += 1.0
    mixed = tl.zeros((QUERIES, V_BLOCK), tl.float32)
    if documents is not None:
        document = load_or_zero(documents + row * keys + position, inside)
    last = tl.minimum((tile * QUERIES + QUERIES - 1) // GROUP, length - 1) + keys - length
    first = 0
    if window > 0:
        first = tl.maximum(tile * QUERIES // GROUP + keys - length - window + 1, 0) // KEYS * KEYS
    for start in range(first, last + 1, KEYS):
        key = start + tl.arange(0, KEYS)
        is_key = key < keys
        far = key.to(tl.int64)[:, None]
        key_at = k + row * k_row + head * k_head + far * k_position + channel
        block = load_or_zero(key_at, is_key[:, None] & (channel < HEAD_DIM))
        scores = tl.dot(queries, block.T, input_precision="ieee") * scale
        if CAPPED:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
        visible = key[None, :] <= position[:, None]
        if window > 0:
            visible = visible & (key[None, :] > position[:, None] - window)
        if documents is not None:
            key_document = load_or_zero(documents + row * keys + key, is_key)
            visible = visible & (key_document[None, :] == document[:, None])
        scores = tl.where(visible & is_key[None, :], scores, MASKED)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights, kept = tl.exp(scores - new_largest[:, None]), tl.exp(largest - new_largest)
        units = tl.sum((weights * UNIT + 0.5).to(tl.int32), 1)
        total = total * kept + units.to(tl.float32) / UNIT
        value_at = v + row * v_row + head * v_head + far * v_position + v_channel
        values = load_or_zero(value_at, is_key[:, None] & (v_channel < V_DIM))
        mixed = tl.dot(weights.to(values.dtype), values, mixed * kept[:, None], input_precision="ieee")
        largest = new_largest
    target = result + ((row * length + query)[:, None] * (HEADS * GROUP) + query_head[:, None]) * V_DIM + v_channel
    tl.store(target, mixed / total[:, None], mask=inside[:, None] & (v_channel < V_DIM))
