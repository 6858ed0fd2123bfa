"""
Causal attention inside documents by torch's flexible attention, which skips blocks that nobody sees.

Which blocks of keys a block of queries sees follows from the least and the greatest document number in each: blocks
whose ranges do not meet have no document in common. It is computed on the device, and nothing waits for it.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask, flex_attention

from drawloom.kernels.attention import Implementation, attention_eager, attention_on_meta

BLOCK = 128
"""Tokens in a block."""

LEAST = 16
"""Channels of a head with which torch has a kernel for GPUs."""


def attention_flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    """
    What attention_eager gives, with a mask as `block_mask` gives it; backwards on GPUs alone.

    Heads too small for torch's kernel go to the eager one. Tensors on the meta device give one of the right shape.
    """
    if q.is_meta:
        return attention_on_meta(q, k, v)
    if q.is_cuda and q.shape[-1] < LEAST:
        return attention_eager(q, k, v, _as_booleans(mask))
    grouped = q.shape[2] != k.shape[2]
    swapped = (x.transpose(1, 2) for x in (q, k, v))
    attend = _compiled() if q.is_cuda and not torch.compiler.is_compiling() else flex_attention
    mixed: Tensor = attend(*swapped, block_mask=mask, enable_gqa=grouped)
    return mixed.transpose(1, 2)


@cache
def _compiled() -> Any:
    """Made when it is first needed, for that takes seconds. Within compiled code it is compiled anyway."""
    return torch.compile(flex_attention, dynamic=False)


def _as_booleans(mask: BlockMask) -> Tensor:
    rows, heads, queries, keys = mask.shape
    return create_mask(mask.mask_mod, rows, heads, queries, keys, mask.kv_indices.device)


def block_mask(documents: Tensor) -> BlockMask:
    """Which blocks see one another wholly, in part or not at all, for documents (rows, length)."""
    rows, length = documents.shape
    count = -(-length // BLOCK)
    last = documents[:, -1:].expand(rows, count * BLOCK - length)
    blocks = torch.cat((documents, last), 1).view(rows, count, BLOCK)
    least, greatest = blocks.amin(-1), blocks.amax(-1)
    before = torch.ones(count, count, dtype=torch.bool, device=documents.device).tril()
    meet = (least[:, :, None] <= greatest[:, None, :]) & (least[:, None, :] <= greatest[:, :, None]) & before
    same = (least[:, :, None] == greatest[:, None, :]) & (greatest[:, :, None] == least[:, None, :])
    whole = same & before.tril(-1)

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    part, lengths = meet & ~whole, (length, length)
    return BlockMask.from_kv_blocks(*_lists(part), *_lists(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=lengths)


def _lists(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and which, those first: for all heads."""
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).unsqueeze(1), order.to(torch.int32).unsqueeze(1)


FLEX = Implementation(block_mask, attention_flex)
