"""Rotary position embedding: pairs of channels turned by their position's angles (Su et al. 2021, arXiv 2104.09864)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.rms_norm import rms_norm_eager


def rope_eager(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, in_place: bool = False) -> Tensor:
    """
    Turn (rows, length, heads, head_dim) by angles given as cosines and sines, (rows, length, turned // 2).

    The first `turned` channels turn, and the others stay as they are. Channel i is paired with channel
    i + turned // 2, or, interleaved, channel 2 i with 2 i + 1. Computed in the wider of the two dtypes and rounded
    once to that of x; the angles get no gradient. In place, x itself is changed and given back: autograd objects if
    somebody still needs what it was.
    """
    return _Rope.apply(x, cos, sin, interleaved, in_place)  # type: ignore[no-untyped-call, no-any-return]


class _Rope(Function):
    """The transpose of a rotation is the rotation back, so nothing but the angles is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, in_place: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        if not in_place:
            return _turn(x, cos, sin, interleaved)
        ctx.mark_dirty(x)
        return x.copy_(_turn(x, cos, sin, interleaved))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        return rope_eager(grad, cos, -sin, ctx.interleaved), None, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Written into parts of one new tensor: joining results would cost another pass."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    if torch.compiler.is_compiling():
        return _joined(x, cos, sin, interleaved)
    turned = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype), device=x.device)
    (a, b, rest), (turned_a, turned_b, turned_rest) = (_parts(t, cos.shape[-1], interleaved) for t in (x, turned))
    torch.mul(a, cos, out=turned_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=turned_b).addcmul_(a, sin)
    turned_rest.copy_(rest)
    return turned.to(x.dtype)


def _joined(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The same without writing into parts of tensors, which torch.compile does not follow; it joins without a pass."""
    a, b, rest = _parts(x, cos.shape[-1], interleaved)
    turned_a, turned_b = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)
    if interleaved:
        return torch.cat((torch.stack((turned_a, turned_b), -1).flatten(-2), rest), -1)
    return torch.cat((turned_a, turned_b, rest), -1)


def _parts(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The first and the second channel of each pair, and the channels that don't turn."""
    rest = x[..., 2 * pairs :]
    if interleaved:
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2], rest
    return x[..., :pairs], x[..., pairs : 2 * pairs], rest


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
