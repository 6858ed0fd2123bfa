"""
Causal attention by cuDNN for rows of one document each, and by flex_attention for all others.

cuDNN knows no documents within a row, and takes about six tenths of flex_attention's time on Hopper. Where it can't
compute (its head_dim, dtype or GPU, or torch's deterministic algorithms), torch's next best implementation does.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from drawloom.kernels.attention import Implementation
from drawloom.kernels.attention_flex import FLEX

WHOLE_ROWS = "whole rows"
"""In place of a mask: each row is one document."""

ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def attention_cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """
    The same as attention_eager, with WHOLE_ROWS or a mask from `block_mask`.

    q (rows, length, heads, head_dim), k and v (rows, length, kv_heads, head_dim); returns
    (rows, length, heads, head_dim). Meta tensors give a meta tensor.
    """
    if mask is not WHOLE_ROWS or q.is_meta:
        return FLEX.attend(q, k, v, mask)
    grouped = q.shape[2] != k.shape[2]
    with sdpa_kernel(ORDER, set_priority=True):
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=grouped
        )
    return mixed.transpose(1, 2)


CUDNN = Implementation(FLEX.mask, attention_cudnn, WHOLE_ROWS)
