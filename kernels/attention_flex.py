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

from drawloom.kernels.attention import Implementation, attention_eager, attention_on_meta

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


def block_mask(document_ids: Tensor, window: int | None = None) -> BlockMask:
    """Which blocks attend to one another fully, partly or not at all, for document ids int64 (rows, length)."""
    rows, length = document_ids.shape
    count = -(-length // BLOCK)
    # A last block that is not full is padded with the last id, which changes neither its least nor its greatest.
    last = document_ids[:, -1:].expand(rows, count * BLOCK - length)
    blocks = torch.cat((document_ids, last), 1).view(rows, count, BLOCK)
    least, greatest = blocks.amin(-1), blocks.amax(-1)
    before = torch.ones(count, count, dtype=torch.bool, device=document_ids.device).tril()
    meet = (least[:, :, None] <= greatest[:, None, :]) & (least[:, None, :] <= greatest[:, :, None]) & before
    same = (least[:, :, None] == greatest[:, None, :]) & (greatest[:, :, None] == least[:, None, :])
    whole = same & before.tril(-1)
    if window is not None:
        # The nearest tokens of blocks `apart` blocks from one another are (apart - 1) * BLOCK + 1 tokens apart.
        meet &= before.triu(-((window + BLOCK - 2) // BLOCK))
        whole &= before.triu(1 - window // BLOCK)

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = (query >= key) if window is None else (query >= key) & (query - key < window)
        return near & (document_ids[row, query] == document_ids[row, key])

    part, lengths = meet & ~whole, (length, length)
    return BlockMask.from_kv_blocks(*_lists(part), *_lists(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=lengths)


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For BlockMask: the number of key blocks of each query block, and their indices first; one head for all."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), order.to(torch.int32).unsqueeze(1)


FLEX = Implementation(block_mask, attention_flex)
