"""
Causal attention within documents: a token attends to itself and to earlier tokens of its document.

All layers have the same mask, so it is computed once per microbatch and passed to every layer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from drawloom.kernels.attention_meta import attention_on_meta
from drawloom.kernels.attention_options import PLAIN_ATTENTION, AttentionOptions
from drawloom.kernels.operation import upcast


class Attend(Protocol):
    """Function for attention with a mask, as `AttentionImplementation` says."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        options: AttentionOptions = PLAIN_ATTENTION,
        sinks: Tensor | None = None,
        /,
    ) -> Tensor: ...


class AttentionImplementation(NamedTuple):
    """
    Implementation of attention: `mask` computes the mask that `attend` takes.

    `mask` takes document ids int64 (rows, length), and a window or None: tokens with the same id in a row are one
    document, and a token attends to the last `window` tokens of its document, itself included. With `queries`, int64
    (tokens,), the queries are every row's tokens at these positions, and all tokens are keys. `attend` takes q
    (rows, tokens, heads, head_dim), k (rows, length, kv_heads, head_dim), v (rows, length, kv_heads, v_dim), the mask,
    options, and sinks (heads,) or None, and returns (rows, tokens, heads, v_dim); kv_heads divides heads.
    `one_document_mask`, if it is not None, replaces the mask where every row is one document and there is no window.
    """

    mask: Callable[..., Any]
    attend: Attend
    one_document_mask: Any = None


def attention_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    options: AttentionOptions = PLAIN_ATTENTION,
    sinks: Tensor | None = None,
) -> Tensor:
    """
    Compute softmax(q k^T * scale) v with grouped queries, over the tokens that the mask allows.

    q (rows, length, heads, head_dim), k (rows, keys, kv_heads, head_dim), v (rows, keys, kv_heads, v_dim), mask bool
    (rows, 1, length, keys) from `create_causal_document_mask` or `create_causal_mask`. Query head h attends to key head
    h // (heads // kv_heads). `sinks` (heads,) are scores for one more key, whose value is 0. Returns
    (rows, length, heads, v_dim) in q's dtype.
    """
    if options.softcap is not None or sinks is not None:
        return _attend_by_scores(q, k, v, mask, options, sinks)
    if q.is_meta:
        return attention_on_meta(q, k, v, mask)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    # torch's causal path without a mask would suit rows of one document, but finding out synchronizes with the GPU.
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped, scale=options.scale)
    return mixed.transpose(1, 2)


def _attend_by_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttentionOptions, sinks: Tensor | None
) -> Tensor:
    """Return attention_eager, computed from all scores (rows, kv_heads, group, length, keys) in at least float32."""
    by_key_head = upcast(q).reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = torch.einsum("rqkgd,rskd->rkgqs", by_key_head, upcast(k)) * options.scale_for(q.shape[-1])
    if options.softcap is not None:
        scores = options.softcap * (scores / options.softcap).tanh()
    scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
    if sinks is not None:
        sink = upcast(sinks).view(1, k.shape[2], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("rkgqs,rskd->rqkgd", weights, upcast(v)).flatten(2, 3).to(q.dtype)


def create_causal_document_mask(
    document_ids: Tensor, window: int | None = None, queries: Tensor | None = None
) -> Tensor:
    """
    Return the keys that queries attend to: bool (rows, 1, queries, keys) from document ids int64 (rows, length).

    `queries`, int64 (tokens,), are the queries' positions in the row; default: all.
    """
    mask = (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril_()
    mask = mask if window is None else mask.triu_(1 - window)
    return mask if queries is None else mask.index_select(2, queries)


def create_causal_mask(
    queries: int, keys: int, window: int | None, device: torch.device, key_count: Tensor | None = None
) -> Tensor:
    """
    Return the keys, at most `window`, that the last tokens of a text attend to: bool (1, 1, queries, keys).

    The text has `keys` tokens, or the first `key_count` of them, int64 () on `device`.
    """
    key = torch.arange(keys, device=device)
    query = torch.arange(queries, device=device)[:, None] + (keys if key_count is None else key_count) - queries
    mask = key <= query
    return (mask if window is None else mask & (key > query - window))[None, None]


EAGER = AttentionImplementation(create_causal_document_mask, attention_eager)
