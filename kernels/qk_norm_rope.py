"""Queries and keys normed by head and then turned by their positions, as Qwen3 does before attention."""

from torch import Tensor

from drawloom.kernels.rms_norm import rms_norm_eager
from drawloom.kernels.rope import rope_eager


def qk_norm_rope_eager(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """
    rope(rms_norm(q)) and rope(rms_norm(k)), each with its own weight.

    q (rows, length, heads, head_dim), k (rows, length, kv_heads, head_dim), weights (head_dim,), cosines and sines
    (rows, length, head_dim // 2): all channels turn, in halves.
    """
    return rope_eager(rms_norm_eager(q, q_weight, eps), cos, sin), rope_eager(
        rms_norm_eager(k, k_weight, eps), cos, sin
    )
