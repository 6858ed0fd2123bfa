"""
Causal attention within documents by torch's flex_attention, which skips fully masked blocks.

Whether a block of queries attends to a block of keys follows from the least and the greatest document id in each:
blocks whose ranges do not overlap have no document in common. All of it is computed on the device, without a sync.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention

from drawloom.kernels.attention import AttentionImplementation, attention_eager, attention_on_meta

BLOCK = 128
"""Tokens in a block: flex_attention's own default."""

MIN_HEAD_DIM = 16
"""The least head_dim for which torch's GPU kernel compiles."""


def attention_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """
    The same as attention_eager, with a mask from `block_mask`; its backward pass runs on GPUs alone.

    q (rows, length, heads, head_dim), k and v (rows, length, kv_heads, head_dim); returns
    (rows, length, heads, head_dim). Heads below MIN_HEAD_DIM go to attention_eager. Meta tensors give a meta tensor.
    """
    if q.is_meta:
        return attention_on_meta(q, k, v)
    if q.is_cuda and q.shape[-1] < MIN_HEAD_DIM:
        return attention_eager(q, k, v, _dense_mask(mask))
    grouped = q.shape[2] != k.shape[2]
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    attend = _compiled() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    mixed: Tensor = attend(*swapped, block_mask=mask, enable_gqa=grouped)
    return mixed.transpose(1, 2)


@cache
def _compiled() -> Any:
    """flex_attention compiled."""
    # Made when it is first needed, since compiling takes seconds; within compiled code it is compiled anyway.
    return torch.compile(flex_attention, dynamic=False)


def _dense_mask(mask: BlockMask) -> Tensor:
    rows, heads, queries, keys = mask.shape
    return create_mask(mask.mask_mod, rows, heads, queries, keys, mask.kv_indices.device)


def block_mask(document_ids: Tensor, window: int | None = None, queries: Tensor | None = None) -> BlockMask:
    """
    Which blocks attend to one another fully, partly or not at all, for document ids int64 (rows, length).

    `queries`, int64 (tokens,), are the places of the queries in the row; all if left out.
    """
    places = torch.arange(document_ids.shape[1], device=document_ids.device)
    asked = places if queries is None else queries
    least, greatest = (bound[:, None, :] for bound in _bounds(document_ids))
    low, high = (bound[:, :, None] for bound in _bounds(document_ids[:, asked]))
    first, last = (bound[:, None, :] for bound in _bounds(places[None]))
    begin, end = (bound[:, :, None] for bound in _bounds(asked[None]))
    meet = (low <= greatest) & (least <= high) & (first <= end)
    whole = (low == greatest) & (least == high) & (last <= begin)
    if window is not None:
        meet &= begin - last < window
        whole &= end - first < window

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        place = asked[query]
        near = (place >= key) if window is None else (place >= key) & (place - key < window)
        return near & (document_ids[row, place] == document_ids[row, key])

    part, lengths = meet & ~whole, (len(asked), len(places))
    return BlockMask.from_kv_blocks(*_lists(part), *_lists(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=lengths)


def _bounds(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest of each block of numbers (rows, length): both (rows, blocks)."""
    rows, length = numbers.shape
    count = -(-length // BLOCK)
    # A last block that is not full is padded with its last number, which changes neither bound.
    last = numbers[:, -1:].expand(rows, count * BLOCK - length)
    blocks = torch.cat((numbers, last), 1).view(rows, count, BLOCK)
    return blocks.amin(-1), blocks.amax(-1)


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For BlockMask: the number of key blocks of each query block, and their indices first; one head for all."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), order.to(torch.int32).unsqueeze(1)


def _mask(document_ids: Tensor, *options: Any) -> BlockMask | None:
    """`block_mask`, but nothing on the meta device, where attention takes none."""
    return None if document_ids.is_meta else block_mask(document_ids, *options)


FLEX = AttentionImplementation(_mask, attention_flex)
