"""Blocks for flex_attention in text trees."""

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from drawloom.kernels.attention.flex import find_extremes_by_block, make_block_mask
from drawloom.kernels.attention.readers import find_reader_ends, number_positions_in_texts


def create_tree_block_mask(document_ids: Tensor, window: int | None = None, queries: Tensor | None = None) -> BlockMask:
    """
    Return the blocks that attend to each other, fully or in part, for the ids of trees, int64 (rows, length).

    The least and the greatest end of readers in a key block decide whether a query block attends to it. `queries`,
    int64 (tokens,), are the queries' indices in the row; default: all.
    """
    index = torch.arange(document_ids.shape[1], device=document_ids.device)
    query_index = index if queries is None else queries
    ends = find_reader_ends(document_ids)
    least, greatest = (bound[:, None, :] for bound in find_extremes_by_block(ends))
    first, last = (bound[:, None, :] for bound in find_extremes_by_block(index[None]))
    begin, end = (bound[:, :, None] for bound in find_extremes_by_block(query_index[None]))
    meet = (first <= end) & (begin < greatest)
    whole = (last <= begin) & (end < least)
    if window is not None:
        positions = number_positions_in_texts(ends)
        first, last = (bound[:, None, :] for bound in find_extremes_by_block(positions))
        begin, end = (bound[:, :, None] for bound in find_extremes_by_block(positions[:, query_index]))
        meet &= begin - last < window
        whole &= end - first < window

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        reader = query_index[query]
        is_reader = (reader >= key) & (reader < ends[row, key])
        return is_reader if window is None else is_reader & (positions[row, reader] - positions[row, key] < window)

    return make_block_mask(meet, whole, sees, (len(query_index), len(index)))
