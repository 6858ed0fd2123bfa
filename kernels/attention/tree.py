"""
Attention in text trees: texts with the same beginning share its tokens.

A tree has its texts one after another in depth-first order, each without the beginning that it shares with the text
before it. Ids from 0 number documents in succession. An id below 0 tells where a token's readers, the tokens that see
it, end: with the id -n a token is seen by itself and by later tokens before the row's index n.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from drawloom.kernels.attention.eager import AttentionImplementation, attention_eager
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions


def create_tree_mask(document_ids: Tensor, window: int | None = None, queries: Tensor | None = None) -> Any:
    """
    Return the mask for `attend_to_tree` from document ids int64 (rows, length): dense on a CPU, by blocks on a GPU.

    A window counts one text's tokens. `queries` are as in `AttentionImplementation`.
    """
    if document_ids.is_meta:
        return None
    from torch.nn.attention.flex_attention import create_block_mask, create_mask  # imports much of torch

    rows, length = document_ids.shape
    create: Any = create_block_mask if document_ids.is_cuda else create_mask
    count = length if queries is None else len(queries)
    return create(create_reader_test(document_ids, window, queries), rows, None, count, length, document_ids.device)


def create_reader_test(document_ids: Tensor, window: int | None, queries: Tensor | None) -> Callable[..., Tensor]:
    """Return the function that tells for row, head, query and key, integers (), whether the query sees the key."""
    ends = find_reader_ends(document_ids)
    positions = number_positions_in_texts(ends)
    index = torch.arange(document_ids.shape[1], device=document_ids.device) if queries is None else queries

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        reader = index[query]
        is_reader = (reader >= key) & (reader < ends[row, key])
        return is_reader if window is None else is_reader & (positions[row, reader] - positions[row, key] < window)

    return sees


def find_reader_ends(document_ids: Tensor) -> Tensor:
    """Return the index behind a token's last reader, int64 (rows, length), from document ids with the same shape."""
    length = document_ids.shape[1]
    index = torch.arange(length, device=document_ids.device)
    stops = torch.where(document_ids != document_ids.roll(-1, 1), index + 1, length).flip(1).cummin(1).values.flip(1)
    return torch.where(document_ids < 0, -document_ids, stops)


def number_positions_in_texts(ends: Tensor) -> Tensor:
    """
    Return positions, int64 (rows, length), whose differences in a text count its tokens, from readers' ends.

    A tree's or a document's first position is its index in the row.
    """
    index = torch.arange(ends.shape[1], device=ends.device).expand_as(ends).contiguous()
    seen = index - torch.searchsorted(ends.sort(1).values, index, right=True)
    return seen + torch.where(seen == 0, index, 0).cummax(1).values


def attend_to_tree(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    options: AttentionOptions = PLAIN_ATTENTION,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention_eager on a CPU, and attention_flex on a GPU, with a mask from `create_tree_mask`."""
    if isinstance(mask, Tensor):
        return attention_eager(q, k, v, mask, options, sinks)
    from drawloom.kernels.attention.flex import attention_flex

    return attention_flex(q, k, v, mask, options, sinks)


TREE = AttentionImplementation(create_tree_mask, attend_to_tree)
