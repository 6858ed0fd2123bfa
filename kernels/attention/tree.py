"""
Attention in trees of texts, in which texts with the same beginning share its tokens.

A tree's texts are laid out one after another, behind the beginning that they share. A document id below 0 tells where a
token's readers end: with the id -n a token is seen by itself and by later tokens before index n of its row. Other ids
number documents of consecutive tokens, as usual. Masks are computed on the device, without a sync.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from drawloom.kernels.attention.eager import AttentionImplementation, attention_eager
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions


class PrefixTree(NamedTuple):
    """
    Layout of texts (rows, length) in trees, one in each packed row.

    `sources`, int64 (trees, width), are the packed tokens' indices in the flattened texts, and `document_ids`, int64
    (trees, width), tell who sees them; `padding`, bool (trees, width), is true where there is no token. Tokens with a
    target have the indices `trained`, int64 (tokens,), in the flattened trees, and `origins` in the flattened texts.
    """

    sources: Tensor
    document_ids: Tensor
    padding: Tensor
    trained: Tensor
    origins: Tensor

    def pack(self, values: Tensor) -> Tensor:
        """Return the values of packed tokens, (trees, width, ...), from (rows, length, ...); padding has any value."""
        return values.flatten(0, 1)[self.sources]

    def pack_trained(self, values: Tensor) -> Tensor:
        """Return the values of tokens with a target, (1, tokens), from values (rows, length)."""
        return values.flatten()[self.origins][None]

    def select_trained(self, hidden: Tensor) -> Tensor:
        """Return the hidden states of tokens with a target, (1, tokens, hidden_size), from (trees, width, ...)."""
        return hidden.flatten(0, 1).index_select(0, self.trained)[None]

    def unpack_trained(self, values: Tensor, like: Tensor) -> Tensor:
        """Return values (rows, length), shaped as `like`, from values of tokens with a target, (1, tokens); else 0."""
        return values.new_zeros(like.numel()).index_copy(0, self.origins, values[0]).view_as(like)


def measure_longest_tree(is_target: Tensor, starts: Tensor, group_size: int) -> int:
    """
    Return the tokens in the longest tree of `group_size` texts in succession, which share the tokens before `starts`.

    is_target: bool (rows, length); starts: int64 (rows,). A text ends at its last target; without one it is left out.
    """
    branches = (_find_stops(is_target) - starts).clamp_min(0).view(-1, group_size).sum(1)
    return int((branches + starts[::group_size] * (branches > 0)).max())


def create_prefix_tree(is_target: Tensor, starts: Tensor, group_size: int, width: int) -> PrefixTree:
    """
    Lay out every group's texts in a row of `width` tokens; arguments are those of `measure_longest_tree`.

    The last shared token is part of each branch, because every branch has another target for it.
    """
    rows, length = is_target.shape
    shape = rows // group_size, width
    sources, padding = torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.bool)
    document_ids = -torch.arange(1, width + 1).repeat(len(sources), 1)  # padding is seen by itself
    stops = _find_stops(is_target)
    for tree, first_row in enumerate(range(0, rows, group_size)):
        branches = [row for row in range(first_row, first_row + group_size) if stops[row] > starts[row]]
        spans = [(row, int(starts[row]), int(stops[row])) for row in branches]
        if branches:
            spans.insert(0, (branches[0], 0, spans[0][1]))
        begin, total = 0, sum(stop - first for _, first, stop in spans)
        for number, (row, first, stop) in enumerate(spans):
            end = begin + stop - first
            sources[tree, begin:end] = torch.arange(row * length + first, row * length + stop)
            document_ids[tree, begin:end] = -end if number else -total
            padding[tree, begin:end] = False
            begin = end
    has_target = (is_target.flatten()[sources] & ~padding).flatten()
    trained = has_target.nonzero()[:, 0] if has_target.any() else torch.zeros(1, dtype=torch.int64)
    return PrefixTree(sources, document_ids, padding, trained, sources.flatten()[trained])


def _find_stops(is_target: Tensor) -> Tensor:
    """Return the index behind a row's last target, 0 without one: int64 (rows,) for bool (rows, length)."""
    return (is_target * torch.arange(1, is_target.shape[1] + 1)).amax(1)


def find_reader_ends(document_ids: Tensor) -> Tensor:
    """Return the index behind the last token that sees a token, int64 (rows, length), from ids of the same shape."""
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


def create_tree_mask(document_ids: Tensor, window: int | None = None, queries: Tensor | None = None) -> Any:
    """
    Return the mask for `attend_to_tree` from document ids int64 (rows, length): dense on a CPU, by blocks on a GPU.

    A window counts the tokens of a text, not those of other branches. `queries` are as in `AttentionImplementation`.
    """
    if document_ids.is_meta:
        return None
    if document_ids.is_cuda:
        from drawloom.kernels.attention.flex import create_document_block_mask  # imports much of torch

        return create_document_block_mask(document_ids, window, queries)
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
