"""
Causal attention by cuDNN for rows of one document each, and by flex_attention for all others.

cuDNN does not support documents within a row, and takes about 60 % of flex_attention's time on Hopper. Where it can't
be used (because of head_dim, dtype, GPU, or torch's deterministic algorithms), torch picks its next implementation.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from drawloom.kernels.attention import AttentionImplementation
from drawloom.kernels.attention_flex import FLEX

WHOLE_ROWS = "whole rows"
"""Value of the mask if each row is one document."""

ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Priority of implementations: cuDNN, and then torch's own order."""


def attention_cudnn(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """
    Compute attention_eager with WHOLE_ROWS or a mask from `block_mask`.

    q (rows, length, heads, head_dim), k and v (rows, length, kv_heads, head_dim); returns
    (rows, length, heads, head_dim). Returns a meta tensor for meta tensors.
    """
    if mask is not WHOLE_ROWS or q.is_meta:
        return FLEX.attend(q, k, v, mask)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _whole_rows(q, k, v).transpose(1, 2)


def _whole_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention like q (rows, heads, length, head_dim), to k and v (rows, kv_heads, length, head_dim)."""
    grouped = q.shape[1] != k.shape[1]
    if torch.compiler.is_compiling():
        # The compiler can't trace the check below; it enters the context once, while it compiles.
        with sdpa_kernel(ORDER, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
    # torch would do the same within that context, but entering it takes the host as long as the attention itself.
    if q.is_cuda and can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, grouped)):
        learned = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        mixed: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, learned, is_causal=True
        )[0]
        return mixed
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)


CUDNN = AttentionImplementation(FLEX.mask, attention_cudnn, WHOLE_ROWS)
