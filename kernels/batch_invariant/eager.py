"""
Operations whose result for a token has the same bits in every batch, at every length, and with a cache.

He et al. 2025, "Defeating Nondeterminism in LLM Inference" (Thinking Machines), names the sources: kernels whose order
of additions depends on the number of rows or keys. Here products have at least `MIN_ROWS` rows, from which on rows do
not depend on their number, and attention adds up blocks of `BLOCK` keys, aligned by position, in ascending order, with
the online softmax of Milakov and Gimelshein 2018, arXiv 1805.02867.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.kernels.attention.eager import AttentionImplementation, attention_on_meta, create_causal_document_mask
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions
from drawloom.kernels.cross_entropy.cut import cut_cross_entropy_eager
from drawloom.kernels.cross_entropy.options import LogitCut
from drawloom.kernels.cross_entropy.token_losses import reshape_and_weight_losses
from drawloom.kernels.grouped_gemm.eager import (
    GroupedGemm,
    count_row_product_flops,
    grouped_gemm_eager,
    list_expert_slices,
)
from drawloom.kernels.operation import register_operator, upcast

MIN_ROWS = 16
"""Rows from which on a row of a product keeps its bits: 12 in MKL, oneDNN and cuBLAS without split-K; with a margin."""

QUERIES = 8
"""
Query rows are a multiple of this number: batched products of MKL keep a row's bits from 4 rows on, on two threads if
their number is a multiple of 4 or at least 12.
"""

BLOCK = 32
"""Keys in a block."""

MASKED = torch.finfo(torch.float32).min / 2
"""Score of a masked key: its weight is 0 beside any other key, and differences of scores are finite."""


def apply_with_padded_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of rows to x (..., width), as if it had at least `MIN_ROWS` rows; return (..., outputs)."""
    rows = x.shape[:-1].numel()
    if rows >= MIN_ROWS:
        return function(x)
    result = function(F.pad(x.reshape(rows, x.shape[-1]), (0, 0, 0, MIN_ROWS - rows)))
    return result[:rows].view(*x.shape[:-1], result.shape[-1])


def attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    options: AttentionOptions = PLAIN_ATTENTION,
    sinks: Tensor | None = None,
) -> Tensor:
    """
    Compute `attention_eager` block by block: q (rows, length, heads, head_dim), k (rows, keys, kv_heads, head_dim),
    v (rows, keys, kv_heads, v_dim), mask bool (rows, 1, length, keys), result (rows, length, heads, v_dim).

    A query's result depends on the keys that it sees, and their positions, not on other queries, rows and later keys.
    """
    if q.is_meta:
        return attention_on_meta(q, k, v, mask)
    rows, length, heads, head_dim = q.shape
    kv_heads, v_dim, group = k.shape[2], v.shape[3], heads // k.shape[2]
    # (rows * kv_heads, length * group, head_dim): the heads of a group multiply the same keys.
    queries = upcast(q).reshape(rows, length, kv_heads, group, head_dim).transpose(1, 2)
    queries = queries.reshape(rows * kv_heads, length * group, head_dim) * options.scale_for(head_dim)
    queries = F.pad(queries, (0, 0, 0, -length * group % QUERIES))
    is_hidden = ~mask.expand(-1, group, -1, -1).transpose(1, 2).reshape(len(mask), 1, length * group, -1)
    is_hidden = F.pad(is_hidden, (0, 0, 0, queries.shape[1] - length * group), value=True)
    largest, total = queries.new_full((*queries.shape[:2], 1), MASKED), queries.new_zeros(*queries.shape[:2], 1)
    if sinks is not None:
        largest = upcast(sinks).view(1, kv_heads, 1, group).expand(rows, -1, length, -1)
        largest = F.pad(largest.reshape(rows * kv_heads, -1, 1), (0, 0, 0, queries.shape[1] - length * group))
        total = torch.ones_like(largest)
    mixed, results = queries.new_zeros(*queries.shape[:2], v_dim), []
    done = length * group - k.shape[1] * group  # rows of queries before the first key, if negative: with a cache
    for first in range(0, k.shape[1], BLOCK):
        keys, values = (_upcast_and_pad_block(x, first) for x in (k, v))
        scores = torch.bmm(queries, keys.transpose(1, 2))
        if options.softcap is not None:
            scores = options.softcap * (scores / options.softcap).tanh()
        scores = _mask_scores(scores, is_hidden[..., first : first + BLOCK], kv_heads)
        new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, kept = (scores - new_largest).exp(), (largest - new_largest).exp()
        total = total * kept + weights.sum(-1, keepdim=True)
        mixed = mixed * kept + torch.bmm(weights, values)
        largest = new_largest
        # Queries up to this block's end see no later key; some stay, if the product would have too few rows.
        done += BLOCK * group
        if (ended := min(done, queries.shape[1] - QUERIES)) > 0:
            results.append(mixed[:, :ended] / total[:, :ended])
            queries, mixed, total, largest = (x[:, ended:] for x in (queries, mixed, total, largest))
            is_hidden, done = is_hidden[:, :, ended:], done - ended
    result = torch.cat([*results, mixed / total], 1)[:, : length * group].view(rows, kv_heads, length, group, v_dim)
    return result.transpose(1, 2).reshape(rows, length, heads, v_dim).to(q.dtype)


def _upcast_and_pad_block(x: Tensor, first: int) -> Tensor:
    """Return a block of x (rows, keys, kv_heads, channels), with zeros behind the last key: (rows * kv_heads, ...)."""
    block = upcast(x[:, first : first + BLOCK]).transpose(1, 2)
    if missing := BLOCK - block.shape[2]:
        block = F.pad(block, (0, 0, 0, missing))
    return block.reshape(-1, BLOCK, block.shape[-1])


def _mask_scores(scores: Tensor, is_hidden: Tensor, kv_heads: int) -> Tensor:
    """Mask scores (rows * kv_heads, queries, BLOCK) at hidden keys, (rows or 1, 1, queries, keys), and at padding."""
    is_hidden = F.pad(is_hidden, (0, BLOCK - is_hidden.shape[-1]), value=True)
    by_head = scores.view(-1, kv_heads, *scores.shape[1:])
    return by_head.masked_fill(is_hidden, MASKED).view(scores.shape)


def cut_cross_entropy_with_padded_rows(
    hidden: Tensor, weight: Tensor, targets: Tensor, cut: LogitCut, token_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """
    Compute `cut_cross_entropy_eager`, without a filter, in chunks with a multiple of `MIN_ROWS` tokens.

    hidden (..., width), weight (vocabulary, width), targets int64 (...), token_weights float32 (...).
    """
    tokens, flat = hidden.reshape(-1, hidden.shape[-1]), targets.flatten()
    missing = -len(flat) % MIN_ROWS
    tokens, flat = F.pad(tokens, (0, 0, 0, missing)), F.pad(flat, (0, missing), value=cut.ignore_index)
    # A chunk has a multiple of the tile's tokens; its words matter only to a filter.
    losses, lse = cut_cross_entropy_eager(tokens, weight, flat, replace(cut, tile=(MIN_ROWS, 1)))
    count = targets.numel()
    return reshape_and_weight_losses((losses[:count], lse[:count]), targets, token_weights)


@register_operator(
    "grouped_gemm_padded_rows",
    lambda x, weight: x.new_empty(len(x), weight.shape[2]),
    is_opaque=True,
    flops=count_row_product_flops,
)
def _multiply_padded_rows_by_expert(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    # An operator for the same reason as the eager one.
    result = x.new_zeros(len(x), weight.shape[2])
    for matrix, rows in zip(weight, list_expert_slices(offsets), strict=True):
        result[rows] = apply_with_padded_rows(partial(torch.matmul, other=matrix), x[rows])
    return result


multiply_groups_with_padded_rows = GroupedGemm(_multiply_padded_rows_by_expert, grouped_gemm_eager.matrices)
"""Grouped product as if every expert had at least `MIN_ROWS` rows."""

BLOCKS = AttentionImplementation(create_causal_document_mask, attend_in_blocks)
