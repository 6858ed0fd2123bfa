"""
Attention in text trees: texts with the same beginning share its tokens.

A tree has the shared beginning, and then its texts' other tokens, one text after another.
"""

from typing import Any

import torch
from torch import Tensor

from drawloom.kernels.attention.eager import AttentionImplementation, attention_eager
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions
from drawloom.kernels.attention.readers import find_reader_ends, number_positions_in_texts


def create_tree_mask(document_ids: Tensor, window: int | None = None, queries: Tensor | None = None) -> Any:
    """
    Return the mask for `attend_to_tree` from document ids int64 (rows, length): dense on a CPU, by blocks on a GPU.

    A window counts one text's tokens. `queries` are as in `AttentionImplementation`.
    """
    if document_ids.is_meta:
        return None
    if document_ids.is_cuda:
        from drawloom.kernels.attention.tree_blocks import create_tree_block_mask  # imports much of torch

        return create_tree_block_mask(document_ids, window, queries)
    ends, keys = find_reader_ends(document_ids), torch.arange(document_ids.shape[1])
    reader = (keys if queries is None else queries)[:, None]
    mask = (reader >= keys) & (reader < ends[:, None])
    if window is not None:
        positions = number_positions_in_texts(ends)
        mask &= positions[:, reader] - positions[:, None] < window
    return mask[:, None]


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
