"""Choices of experts as a table of tokens by experts, in Triton: whole rows of the table are written at once."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from drawloom.kernels.operation import register_kernel
from drawloom.kernels.triton.primitives import check_floats, next_power_of_2

TILE = 4096
"""Elements of the table that a program writes."""


def indices_to_multihot_triton(experts_of: Tensor, probabilities: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """What indices_to_multihot_eager gives, for float32, bfloat16 and float16."""
    check_floats("indices_to_multihot_triton", probabilities)
    both: tuple[Tensor, Tensor] = _Multihot.apply(experts_of, probabilities, experts)  # type: ignore[no-untyped-call]
    return both


class _Multihot(Function):
    """Saves the choices alone."""

    @staticmethod
    def forward(ctx: Any, experts_of: Tensor, probabilities: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(experts_of)
        chosen, spread = _multihot(experts_of, probabilities, experts)
        ctx.mark_non_differentiable(chosen)
        return chosen, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[None, Tensor, None]:
        (experts_of,) = ctx.saved_tensors
        known = experts_of >= 0
        if not grad.shape[1]:
            return None, grad.new_zeros(experts_of.shape), None
        return None, grad.gather(1, experts_of.where(known, 0).to(torch.int64)).where(known, 0), None


def _like(experts_of: Tensor, probabilities: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    shape = len(experts_of), experts
    return experts_of.new_empty(shape, dtype=torch.bool), probabilities.new_empty(shape)


@register_kernel(
    "indices_to_multihot(Tensor experts_of, Tensor probabilities, int experts) -> (Tensor, Tensor)", fake=_like
)
def _multihot(experts_of: Tensor, probabilities: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    chosen, spread = _like(experts_of, probabilities, experts)
    if not chosen.numel():
        return chosen, spread
    width = next_power_of_2(experts)
    tokens = max(1, TILE // width)
    _kernel[(triton.cdiv(len(chosen), tokens),)](
        experts_of.contiguous(),
        probabilities.contiguous(),
        chosen.view(torch.int8),
        spread,
        len(chosen),
        experts,
        CHOICES=experts_of.shape[1],
        TOKENS=tokens,
        WIDTH=width,
        enable_fp_fusion=True,
    )
    return chosen, spread


# fmt: off
@triton.jit(do_not_specialize=["tokens"])
def _kernel(
    experts_of, probabilities, chosen, spread, tokens, experts,
    CHOICES: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    each = tl.arange(0, WIDTH)[None, :]
    inside = token < tokens
    is_chosen = tl.zeros((TOKENS, WIDTH), tl.int32)
    total = tl.zeros((TOKENS, WIDTH), tl.float32)
    for choice in tl.static_range(CHOICES):
        expert = tl.load(experts_of + token * CHOICES + choice, mask=inside, other=-1)
        probability = tl.load(probabilities + token * CHOICES + choice, mask=inside, other=0.0).to(tl.float32)
        own = expert == each
        is_chosen |= own.to(tl.int32)
        total += tl.where(own, probability, 0.0)
    mask = inside & (each < experts)
    tl.store(chosen + token * experts + each, is_chosen.to(tl.int8), mask=mask)
    tl.store(spread + token * experts + each, total.to(spread.dtype.element_ty), mask=mask)
