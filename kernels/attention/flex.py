"""
Causal attention within documents by torch's flex_attention, which skips fully masked blocks.

The least and the greatest document id in a query block and in a key block decide whether one attends to the other:
blocks whose ranges do not overlap have no document in common. The mask is computed on the device, without a sync.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_mask, flex_attention

from drawloom.kernels.attention.eager import (
    AttentionImplementation,
    attention_and_lse_on_meta,
    attention_eager,
    attention_on_meta,
)
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions

BLOCK = 128
"""Tokens in a block, the default of flex_attention."""

MIN_HEAD_DIM = 16
"""The least head_dim for which torch's GPU kernel compiles."""


def attention_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: BlockMask,
    options: AttentionOptions = PLAIN_ATTENTION,
    sinks: Tensor | None = None,
) -> Tensor:
    """
    Compute attention_eager with a mask from `create_document_block_mask`; the backward pass runs only on GPUs.

    q (rows, length, heads, head_dim), k (rows, length, kv_heads, head_dim), v (rows, length, kv_heads, v_dim); returns
    (rows, length, heads, v_dim), a meta tensor for meta tensors. On GPUs, attention_eager computes heads narrower than
    MIN_HEAD_DIM.
    """
    if q.is_cuda and min(q.shape[-1], v.shape[-1]) < MIN_HEAD_DIM:
        return attention_eager(q, k, v, _convert_to_dense_mask(mask), options, sinks)
    if sinks is None:
        return attention_on_meta(q, k, v) if q.is_meta else _run_flex_attention(q, k, v, mask, options).transpose(1, 2)
    if q.is_meta:
        mixed, lse = attention_and_lse_on_meta(q, k, v)
        mixed = mixed.transpose(1, 2)
    else:
        mixed, statistics = _run_flex_attention(q, k, v, mask, options, return_aux=AuxRequest(lse=True))
        lse = statistics.lse
    # A sink is one more key, whose value is 0.
    weights = (lse - sinks[:, None]).sigmoid()
    return (mixed * weights[..., None].to(mixed.dtype)).transpose(1, 2)


def _run_flex_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, options: AttentionOptions, **requests: Any
) -> Any:
    """Return flex_attention's result (rows, heads, length, v_dim), and statistics if `requests` ask for them."""
    grouped = q.shape[2] != k.shape[2]
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    attend = _compile_flex_attention() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    score_mod = None if options.softcap is None else _create_soft_cap(options.softcap)
    return attend(
        *swapped,
        score_mod=score_mod,
        block_mask=mask,
        scale=options.scale,
        enable_gqa=grouped,
        kernel_options={"BACKEND": "TRITON"},  # for rows below 128 tokens torch would choose a kernel for decoding
        **requests,
    )


@cache
def _create_soft_cap(limit: float) -> Callable[..., Tensor]:
    """Return the function for capped scores, the same one for equal limits, since torch compiles it."""

    def cap(score: Tensor, *_: Tensor) -> Tensor:
        return limit * torch.tanh(score / limit)

    return cap


@cache
def _compile_flex_attention() -> Any:
    """Return flex_attention, compiled."""
    # Compiling takes seconds, so it waits for the first call; within compiled code torch compiles it anyway.
    return torch.compile(flex_attention, dynamic=False)


def _convert_to_dense_mask(mask: BlockMask) -> Tensor:
    """Return the mask for all pairs: bool (rows, heads, queries, keys)."""
    rows, heads, queries, keys = mask.shape
    return create_mask(mask.mask_mod, rows, heads, queries, keys, mask.kv_indices.device)


def create_document_block_mask(
    document_ids: Tensor, window: int | None = None, queries: Tensor | None = None
) -> BlockMask:
    """
    Return the blocks that attend to each other, fully or in part, for document ids int64 (rows, length).

    `queries`, int64 (tokens,), are the queries' positions in the row; default: all.
    """
    positions = torch.arange(document_ids.shape[1], device=document_ids.device)
    query_positions = positions if queries is None else queries
    least, greatest = (bound[:, None, :] for bound in _find_extremes_by_block(document_ids))
    low, high = (bound[:, :, None] for bound in _find_extremes_by_block(document_ids[:, query_positions]))
    first, last = (bound[:, None, :] for bound in _find_extremes_by_block(positions[None]))
    begin, end = (bound[:, :, None] for bound in _find_extremes_by_block(query_positions[None]))
    meet = (low <= greatest) & (least <= high) & (first <= end)
    whole = (low == greatest) & (least == high) & (last <= begin)
    if window is not None:
        meet &= begin - last < window
        whole &= end - first < window

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        position = query_positions[query]
        is_near = (position >= key) if window is None else (position >= key) & (position - key < window)
        return is_near & (document_ids[row, position] == document_ids[row, key])

    partial, lengths = meet & ~whole, (len(query_positions), len(positions))
    blocks = *_count_and_list_key_blocks(partial), *_count_and_list_key_blocks(whole)
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=lengths)


def _find_extremes_by_block(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the least and the greatest number in each block of (rows, length), both (rows, blocks)."""
    rows, length = numbers.shape
    count = -(-length // BLOCK)
    # An incomplete last block is padded with its last number, which changes neither bound.
    last = numbers[:, -1:].expand(rows, count * BLOCK - length)
    blocks = torch.cat((numbers, last), 1).view(rows, count, BLOCK)
    return blocks.amin(-1), blocks.amax(-1)


def _count_and_list_key_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """
    Return the arguments for BlockMask: by query block the number of key blocks, and their indices, equal for all heads.
    """
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), order.to(torch.int32).unsqueeze(1)


def _create_block_mask_unless_meta(document_ids: Tensor, *options: Any) -> BlockMask | None:
    """Return `create_document_block_mask`, or None on the meta device, where attention takes no mask."""
    return None if document_ids.is_meta else create_document_block_mask(document_ids, *options)


FLEX = AttentionImplementation(_create_block_mask_unless_meta, attention_flex)
