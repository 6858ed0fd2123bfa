"""Rotary position embedding: rotate channel pairs by a position's angles (Su et al. 2021, arXiv 2104.09864)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.rms_norm.eager import rms_norm_eager


def rope_eager(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """
    Rotate x (rows, length, heads, head_dim) by angles with these cos and sin, (rows, length, rotary_dim // 2).

    The first `rotary_dim` channels are rotated, and the others are copied. Channel i is paired with channel i +
    rotary_dim // 2, or, if `interleaved`, channel 2 i with 2 i + 1. Computed in the wider of the two dtypes and rounded
    once to x's dtype; the angles get no gradient.
    """
    return _Rope.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call, no-any-return]


class _Rope(Function):
    """Rotation that saves only the angles: its transpose is the rotation by the negative angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        """Return a tensor like x (rows, length, heads, head_dim); cos and sin are (rows, length, rotary_dim // 2)."""
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
        if torch.compiler.is_compiling():
            return _rotate_by_concatenation(x, cos, sin, interleaved)
        # Results are written into slices of one tensor: torch.cat would cost another pass over memory.
        rotated = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype), device=x.device)
        (a, b, rest), (rotated_a, rotated_b, rotated_rest) = (
            _split_pairs_and_unrotated(t, cos.shape[-1], interleaved) for t in (x, rotated)
        )
        torch.mul(a, cos, out=rotated_a).addcmul_(b, sin, value=-1)
        torch.mul(b, cos, out=rotated_b).addcmul_(a, sin)
        rotated_rest.copy_(rest)
        return rotated.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return rope_eager(grad, cos, -sin, ctx.interleaved), None, None, None


def _rotate_by_concatenation(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate x by torch.cat, which torch.compile fuses; it does not trace writing into slices with `out=`."""
    a, b, rest = _split_pairs_and_unrotated(x, cos.shape[-1], interleaved)
    rotated_a, rotated_b = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)
    if interleaved:
        return torch.cat((torch.stack((rotated_a, rotated_b), -1).flatten(-2), rest), -1)
    return torch.cat((rotated_a, rotated_b, rest), -1)


def _split_pairs_and_unrotated(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return the pairs' first and second channels, and the channels without rotation."""
    rest = x[..., 2 * pairs :]
    if interleaved:
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2], rest
    return x[..., :pairs], x[..., pairs : 2 * pairs], rest


def qk_norm_rope_eager(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """
    Return rope(rms_norm(q)) and rope(rms_norm(k)), with two norm weights.

    q (rows, length, heads, head_dim), k (rows, length, kv_heads, head_dim), weights (head_dim,), cos and sin (rows,
    length, head_dim // 2): all channels are rotated, channel i paired with i + head_dim // 2.
    """
    return rope_eager(rms_norm_eager(q, q_weight, eps), cos, sin), rope_eager(
        rms_norm_eager(k, k_weight, eps), cos, sin
    )
