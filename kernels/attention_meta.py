"""Attention on the meta device, where a run's plan counts its FLOPs and the memory it keeps."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.costs import register_costs
from drawloom.kernels.operation import once_differentiable


def attention_on_meta(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None
) -> Tensor:
    """
    Return a meta tensor (rows, length, heads, v_dim) like q (rows, length, heads, head_dim).

    k is (rows, keys, kv_heads, head_dim), v (rows, keys, kv_heads, v_dim) and sinks (heads,). The same tensors are kept
    for the backward pass as by implementations for GPUs and by torch's for the CPU; the latter also keeps a bool mask
    (rows, 1, length, keys), in q's dtype.
    """
    return attention_and_lse_on_meta(q, k, v, mask, sinks)[0]


def attention_and_lse_on_meta(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the result of `attention_on_meta`, and the scores' log-sum-exp, float32 (rows, heads, length)."""
    return _OnMeta.apply(q, k, v, mask, sinks)  # type: ignore[no-untyped-call, no-any-return]


class _OnMeta(Function):
    """Attention on the meta device; saves q, k, v, the result, log-sum-exp, mask and sinks like real attention."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return tensors (rows, length, heads, v_dim) and (rows, heads, length); q is (rows, length, heads, dim)."""
        mixed, lse = torch.ops.drawloom.attention(q, k, v)
        ctx.save_for_backward(q, k, v, mixed, lse, None if mask is None else mask.to(q.dtype), sinks)
        return mixed, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        sinks = ctx.saved_tensors[6]
        grads = torch.ops.drawloom.attention_backward(grad, *ctx.saved_tensors[:3])
        return *grads, None, None if sinks is None else sinks.new_empty(sinks.shape)


# Operators, so that a program that counts operations sees attention, and not the allocation of a meta tensor.
torch.library.define("drawloom::attention", "(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
torch.library.define("drawloom::attention_backward", "(Tensor grad, Tensor q, Tensor k, Tensor v) -> Tensor[]")


@torch.library.register_fake("drawloom::attention")  # type: ignore[untyped-decorator]
def _fake_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    return q.new_empty(*q.shape[:3], v.shape[3]), lse


@torch.library.register_fake("drawloom::attention_backward")  # type: ignore[untyped-decorator]
def _fake_attention_backward(grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in inputs]


def attention_flops(pairs: float, head_dim: int, v_dim: int, *, backward: bool = False) -> float:
    """
    Return attention's FLOPs for `pairs` query-key pairs, counted for every head.

    A forward pass has a product over `head_dim` channels and one over `v_dim`. A backward pass, which
    computes the scores again, has three products over `head_dim` channels and two over `v_dim`.
    """
    return 2.0 * pairs * (3 * head_dim + 2 * v_dim if backward else head_dim + v_dim)


def _count_query_key_pairs(q: Tensor, k: Tensor) -> int:
    """Return the query-key pairs over all rows and heads, without regard to a mask."""
    return q.shape[:3].numel() * k.shape[1]


def _count_forward_flops(q: Tensor, k: Tensor, v: Tensor) -> float:
    return attention_flops(_count_query_key_pairs(q, k), q.shape[3], v.shape[3])


def _count_backward_flops(q: Tensor, k: Tensor, v: Tensor) -> float:
    return attention_flops(_count_query_key_pairs(q, k), q.shape[3], v.shape[3], backward=True)


def _count_backward_scratch_bytes(q: Tensor, k: Tensor, v: Tensor) -> int:
    # cuDNN sums gradients of queries in float32, and computes gradients of keys and values for each head of queries.
    by_query_head = q.nbytes + q.shape[:3].numel() * v.shape[3] * v.itemsize
    return q.numel() * 4 + (by_query_head if k.shape[2] < q.shape[2] else 0)


register_costs(torch.ops.drawloom.attention, flops=_count_forward_flops, is_attention=True)
register_costs(
    torch.ops.drawloom.attention_backward,
    flops=_count_backward_flops,
    scratch=_count_backward_scratch_bytes,
    is_attention=True,
)
