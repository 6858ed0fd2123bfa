"""Expert indices as a multi-hot table of tokens by experts, in Triton: each program writes whole rows of the table."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.operation import once_differentiable, register_kernel
from drawloom.kernels.triton.launch import lean
from drawloom.kernels.triton.primitives import cdiv, check_floats, next_power_of_2

TILE = 4096
"""Elements of the table that a program writes."""


def indices_to_multihot_triton(
    expert_indices: Tensor, probabilities: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    """
    The same as indices_to_multihot_eager, for float32, bfloat16 and float16.

    expert_indices and probabilities (tokens, top_k); returns bool and probabilities, both (tokens, num_experts).
    """
    check_floats("indices_to_multihot_triton", probabilities)
    both: tuple[Tensor, Tensor] = _Multihot.apply(expert_indices, probabilities, num_experts)  # type: ignore[no-untyped-call]
    return both


class _Multihot(Function):
    """Saves the indices alone."""

    @staticmethod
    def forward(ctx: Any, expert_indices: Tensor, probabilities: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """Both (tokens, top_k); gives bool, and probabilities in their dtype, (tokens, num_experts)."""
        ctx.save_for_backward(expert_indices)
        chosen, spread = _multihot(expert_indices, probabilities, num_experts)
        ctx.mark_non_differentiable(chosen)
        return chosen, spread

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, grad: Tensor) -> tuple[None, Tensor, None]:
        (expert_indices,) = ctx.saved_tensors
        known = expert_indices >= 0
        if not grad.shape[1]:
            return None, grad.new_zeros(expert_indices.shape), None
        return None, grad.gather(1, expert_indices.where(known, 0).to(torch.int64)).where(known, 0), None


def _like(expert_indices: Tensor, probabilities: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    shape = len(expert_indices), num_experts
    return expert_indices.new_empty(shape, dtype=torch.bool), probabilities.new_empty(shape)


@register_kernel(
    "indices_to_multihot(Tensor expert_indices, Tensor probabilities, int num_experts) -> (Tensor, Tensor)", fake=_like
)
def _multihot(expert_indices: Tensor, probabilities: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    chosen, spread = _like(expert_indices, probabilities, num_experts)
    if not chosen.numel():
        return chosen, spread
    width = next_power_of_2(num_experts)
    tokens = max(1, TILE // width)
    _kernel[(cdiv(len(chosen), tokens),)](
        expert_indices.contiguous(),
        probabilities.contiguous(),
        chosen.view(torch.int8),
        spread,
        len(chosen),
        num_experts,
        CHOICES=expert_indices.shape[1],
        TOKENS=tokens,
        WIDTH=width,
        enable_fp_fusion=True,
    )
    return chosen, spread


# fmt: off
@lean
@triton.jit(do_not_specialize=["tokens"])
def _kernel(
    expert_indices, probabilities, chosen, spread, tokens, num_experts,
    CHOICES: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):
    # fmt: on
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    each = tl.arange(0, WIDTH)[None, :]
    inside = token < tokens
    is_chosen = tl.zeros((TOKENS, WIDTH), tl.int32)
    total = tl.zeros((TOKENS, WIDTH), tl.float32)
    for choice in tl.static_range(CHOICES):
        expert = tl.load(expert_indices + token * CHOICES + choice, mask=inside, other=-1)
        probability = tl.load(probabilities + token * CHOICES + choice, mask=inside, other=0.0).to(tl.float32)
        own = expert == each
        is_chosen |= own.to(tl.int32)
        total += tl.where(own, probability, 0.0)
    mask = inside & (each < num_experts)
    tl.store(chosen + token * num_experts + each, is_chosen.to(tl.int8), mask=mask)
    tl.store(spread + token * num_experts + each, total.to(spread.dtype.element_ty), mask=mask)
