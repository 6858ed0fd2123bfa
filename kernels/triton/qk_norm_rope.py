"""
RMSNorm and rotary position embedding for queries and keys in one launch: half the memory traffic, and one rounding.

The first programs process queries, the others keys. Every program sums its part of the weights' gradients, and the
programs' sums are added in a fixed order, so the result is deterministic.
"""

import torch
from torch import Tensor

from drawloom.kernels.operation import make_differentiable, register_kernel
from drawloom.kernels.triton.primitives import (
    cdiv,
    check_floats,
    contiguous_last_dim,
    next_power_of_2,
    sm_count,
    sum_partials,
    unify_angle_strides,
)
from drawloom.kernels.triton.qk_norm_rope_kernels import backward_kernel, forward_kernel

TILE = 4096
"""Elements of a program's tile in the forward pass; twice as many as in the backward pass, which has more values."""

PROGRAMS = 2
"""Programs of the backward pass per multiprocessor, as for rms_norm."""


def qk_norm_rope_triton(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """
    Compute qk_norm_rope_eager for float32, bfloat16 and float16, without rounding between norm and rotation.

    q (rows, length, heads, head_dim), k (rows, length, kv_heads, head_dim), weights (head_dim,), cos and sin
    (rows, length, head_dim // 2).
    """
    check_floats("qk_norm_rope_triton", q, k, q_weight, k_weight, cos, sin)
    return _differentiable_qk_norm_rope(q, k, q_weight, k_weight, eps, cos, sin)  # type: ignore[no-any-return]


def _allocate_forward(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return empty tensors for rotated queries and keys, and for 1 / rms by vector."""
    q_rstd, k_rstd = (x.new_empty(x.shape[:-1], dtype=torch.float32) for x in (q, k))
    return q.new_empty(q.shape), k.new_empty(k.shape), q_rstd, k_rstd


@register_kernel("qk_norm_rope", _allocate_forward)
def _forward(
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
) -> None:
    if not q.numel():
        return
    q, k, (cos, sin) = contiguous_last_dim(q), contiguous_last_dim(k), unify_angle_strides(cos, sin)
    rows, length, _, channels = q.shape
    block = next_power_of_2(channels // 2)
    vectors = max(1, TILE // (2 * block))
    q_tiles, k_tiles = (cdiv(length * x.shape[2], vectors) for x in (q, k))
    forward_kernel[(rows * (q_tiles + k_tiles),)](
        q,
        k,
        q_weight.contiguous(),
        k_weight.contiguous(),
        cos,
        sin,
        *results,
        rows * q_tiles,
        q_tiles,
        k_tiles,
        length,
        eps,
        *q.stride()[:3],
        *k.stride()[:3],
        *cos.stride()[:2],
        Q_HEADS=q.shape[2],
        K_HEADS=k.shape[2],
        PAIRS=channels // 2,
        VECTORS=vectors,
        BLOCK=block,
        num_warps=8,
        enable_fp_fusion=True,
    )


@register_kernel(
    "qk_norm_rope_backward",
    lambda q, k, q_weight, k_weight: tuple(x.new_empty(x.shape) for x in (q, k, q_weight, k_weight)),
)
def _backward(
    results: tuple[Tensor, Tensor, Tensor, Tensor],
    q_grad: Tensor,
    k_grad: Tensor,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
) -> None:
    q_result, k_result, grad_q_weight, grad_k_weight = results
    if not q.numel():
        grad_q_weight.zero_()
        grad_k_weight.zero_()
        return
    q_grad, k_grad, q, k = (contiguous_last_dim(x) for x in (q_grad, k_grad, q, k))
    cos, sin = unify_angle_strides(cos, sin)
    rows, length, _, channels = q.shape
    block = next_power_of_2(channels // 2)
    vectors = max(1, TILE // (4 * block))
    q_tiles, k_tiles = (cdiv(length * x.shape[2], vectors) for x in (q, k))
    q_programs, k_programs = _divide_programs(rows * q_tiles, rows * k_tiles, PROGRAMS * sm_count(q.device))
    parts = q.new_empty(q_programs + k_programs, channels, dtype=torch.float32)
    backward_kernel[(q_programs + k_programs,)](
        q_grad,
        k_grad,
        q,
        k,
        q_weight.contiguous(),
        k_weight.contiguous(),
        q_rstd,
        k_rstd,
        cos,
        sin,
        q_result,
        k_result,
        parts,
        q_programs,
        rows * q_tiles,
        rows * k_tiles,
        q_tiles,
        k_tiles,
        length,
        *q_grad.stride()[:3],
        *k_grad.stride()[:3],
        *q.stride()[:3],
        *k.stride()[:3],
        *cos.stride()[:2],
        Q_HEADS=q.shape[2],
        K_HEADS=k.shape[2],
        PAIRS=channels // 2,
        VECTORS=vectors,
        BLOCK=block,
        num_warps=4,
        enable_fp_fusion=True,
    )
    sum_partials(parts[:q_programs], grad_q_weight)
    sum_partials(parts[q_programs:], grad_k_weight)


_differentiable_qk_norm_rope = make_differentiable(_forward, _backward, results=2)
"""Norm and rotation, with saved queries, keys and one float32 per vector."""


def _divide_programs(q_tiles: int, k_tiles: int, programs: int) -> tuple[int, int]:
    """Return the program counts for queries and for keys, in proportion to their tiles."""
    k_programs = max(1, programs * k_tiles // (q_tiles + k_tiles))
    return min(q_tiles, max(1, programs - k_programs)), min(k_tiles, k_programs)
