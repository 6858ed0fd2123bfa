"""qk_norm_rope against rms_norm followed by rope."""

import torch

from drawloom.kernels.rms_norm.eager import rms_norm_eager
from drawloom.kernels.rope.eager import qk_norm_rope_eager, rope_eager
from drawloom.kernels.rope.frequencies import compute_rope_cos_and_sin


def test_queries_and_keys_use_their_own_weights() -> None:
    """Queries and keys, with different head counts, are normalized with their own weights, then rotated."""
    q, k, q_weight, k_weight = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 1, 8), torch.randn(8), torch.randn(8)
    cos, sin = compute_rope_cos_and_sin(torch.arange(3).expand(2, 3), 8, 1e4)
    rotated_q, rotated_k = qk_norm_rope_eager(q, k, q_weight, k_weight, 0.1, cos, sin)
    assert torch.equal(rotated_q, rope_eager(rms_norm_eager(q, q_weight, 0.1), cos, sin))
    assert torch.equal(rotated_k, rope_eager(rms_norm_eager(k, k_weight, 0.1), cos, sin))
