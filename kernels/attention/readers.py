"""
Readers, the tokens that see a token, in documents and in text trees.

Ids from 0 number documents. An id below 0 tells where a token's readers end: with the id -n a token is seen by itself
and by later tokens before the row's index n. Results are computed on the device, without a sync.
"""

import torch
from torch import Tensor


def find_reader_ends(document_ids: Tensor) -> Tensor:
    """Return the index behind a token's last reader, int64 (rows, length), from document ids with the same shape."""
    length = document_ids.shape[1]
    index = torch.arange(length, device=document_ids.device)
    is_last = document_ids != document_ids.roll(-1, 1)
    stops = torch.where(is_last, index + 1, length).flip(1).cummin(1).values.flip(1)
    return torch.where(document_ids < 0, -document_ids, stops)


def number_positions_in_texts(ends: Tensor) -> Tensor:
    """
    Return positions, int64 (rows, length), whose differences in a text count its tokens, from readers' ends.

    A tree's or a document's first position is its index in the row.
    """
    index = torch.arange(ends.shape[1], device=ends.device).expand_as(ends).contiguous()
    seen = index - torch.searchsorted(ends.sort(1).values, index, right=True)
    return seen + torch.where(seen == 0, index, 0).cummax(1).values
