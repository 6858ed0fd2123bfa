"""
Causal attention within documents: a token attends to itself and to earlier tokens of its document.

The mask is the same for all layers of a model, so it is made once for a microbatch and passed to each layer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Implementation(NamedTuple):
    """
    An implementation of attention: `mask` makes what `attend` takes as its mask.

    `mask` takes document ids int64 (rows, length): tokens of a row with the same id are one document. `attend` takes
    q (rows, length, heads, head_dim), k and v (rows, length, kv_heads, head_dim) and the mask, and returns
    (rows, length, heads, head_dim); kv_heads divides heads.
    """

    mask: Callable[[Tensor], Any]
    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def attention_eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """
    softmax(q k^T / sqrt(head_dim)) v with grouped queries, over the tokens that the mask allows.

    q (rows, length, heads, head_dim), k and v (rows, length, kv_heads, head_dim), mask bool (rows, 1, length, length)
    from `causal_document_mask`. Query head h attends to key head h // (heads // kv_heads). Returns
    (rows, length, heads, head_dim) in the dtype of q.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    # torch's causal path without a mask would do for rows of one document, but to ask that synchronizes with the GPU.
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return mixed.transpose(1, 2)


def causal_document_mask(document_ids: Tensor) -> Tensor:
    """The keys that each query attends to: bool (rows, 1, queries, keys) from document ids int64 (rows, length)."""
    return (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril_()


EAGER = Implementation(causal_document_mask, attention_eager)


def attention_on_meta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A meta tensor like q (rows, length, heads, head_dim), with k and v (rows, length, kv_heads, head_dim)."""
    # It is computed from all three, so that autograd's graph has the edges that attention gives it.
    return q + (k.sum() + v.sum())
