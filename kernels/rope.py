"""Rotary position embedding: pairs of channels turned by their position's angles (Su et al. 2021, arXiv 2104.09864)."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def rope_eager(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """
    Turn (rows, length, heads, head_dim) by angles given as cosines and sines, (rows, length, head_dim // 2).

    Channel i is paired with channel i + head_dim // 2. Computed in the wider of the two dtypes and rounded once to that
    of x; the angles get no gradient.
    """
    return _Rope.apply(x, cos, sin)  # type: ignore[no-untyped-call, no-any-return]


class _Rope(Function):
    """The transpose of a rotation is the rotation back, so nothing but the angles is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return rope_eager(grad, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Written into halves of one new tensor: joining two results would cost another pass."""
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, cos.dtype), device=x.device)
    (a, b), (turned_a, turned_b) = x.chunk(2, -1), turned.chunk(2, -1)
    torch.mul(a, cos, out=turned_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=turned_b).addcmul_(a, sin)
    return turned.to(x.dtype)
