"""
Causal attention inside documents: a token sees itself and the tokens before it that belong to its document.

Which tokens see which is the same for all layers of a model: an implementation makes its mask of it once, and each
layer's attention takes the mask.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Implementation(NamedTuple):
    """
    Two functions: `mask` of documents int64 (rows, length), a row's tokens with the same number being one document.

    `attend` takes q (rows, length, heads, head_dim), k and v (rows, length, kv_heads, head_dim) and such a mask; it
    gives (rows, length, heads, head_dim). kv_heads divides heads.
    """

    mask: Callable[[Tensor], Any]
    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor]


def attention_eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """
    softmax(q k^T / sqrt(head_dim)) v with grouped queries, over the tokens that each token may see.

    q (rows, length, heads, head_dim), k and v (rows, length, kv_heads, head_dim), mask booleans (rows, 1, length,
    length) as `visible` gives them. Query head h reads key head h // (heads // kv_heads). Gives (rows, length, heads,
    head_dim).
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    # torch has a causal path without a mask, but only the data can say whether it applies: a wait on an accelerator.
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return mixed.transpose(1, 2)


def visible(documents: Tensor) -> Tensor:
    """Which keys each query may see: booleans (rows, 1, queries, keys) from document numbers (rows, length)."""
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril_()


EAGER = Implementation(visible, attention_eager)


def attention_on_meta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A tensor of the result's shape and dtype on the meta device, which depends on all three as attention does."""
    return q + (k.sum() + v.sum())
