"""
Attention on the meta device, where a run's plan counts its FLOPs and the memory it keeps.

Causal attention within documents: a token attends to itself and to earlier tokens of its document.

All layers have the same mask, so it is computed once per microbatch and passed to every layer.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions
from drawloom.kernels.operation import once_differentiable, register_costs, upcast


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


class Attend(Protocol):
    """Function for attention with a mask, as `AttentionImplementation` says."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Any,
        options: AttentionOptions = PLAIN_ATTENTION,
        sinks: Tensor | None = None,
        /,
    ) -> Tensor: ...


class AttentionImplementation(NamedTuple):
    """
    Implementation of attention: `mask` computes the mask that `attend` takes.

    `mask` takes document ids int64 (rows, length), and a window or None: consecutive tokens with the same id are one
    document, and a token attends to the last `window` tokens of its document, itself included. With `queries`, int64
    (tokens,), the queries are every row's tokens at these positions, and all tokens are keys. `attend` takes q
    (rows, tokens, heads, head_dim), k (rows, length, kv_heads, head_dim), v (rows, length, kv_heads, v_dim), the mask,
    options, and sinks (heads,) or None, and returns (rows, tokens, heads, v_dim); kv_heads divides heads.
    `one_document_mask`, if it is not None, replaces the mask where every row is one document and there is no window;
    `one_document_pieces` returns the mask for a part of such rows, from which `attend` gathers keys and values.
    """

    mask: Callable[..., Any]
    attend: Attend
    one_document_mask: Any = None
    one_document_pieces: Callable[[Any], Any] | None = None


def attention_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    options: AttentionOptions = PLAIN_ATTENTION,
    sinks: Tensor | None = None,
) -> Tensor:
    """
    Compute softmax(q k^T * scale) v with grouped queries, over the tokens that the mask allows.

    q (rows, length, heads, head_dim), k (rows, keys, kv_heads, head_dim), v (rows, keys, kv_heads, v_dim), mask bool
    (rows, 1, length, keys) from `create_causal_document_mask` or `create_causal_mask`. Query head h attends to key head
    h // (heads // kv_heads). `sinks` (heads,) are scores for one more key, whose value is 0. Returns
    (rows, length, heads, v_dim) in q's dtype.
    """
    if options.softcap is not None or sinks is not None:
        return _attend_by_scores(q, k, v, mask, options, sinks)
    if q.is_meta:
        return attention_on_meta(q, k, v, mask)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    # torch's causal path without a mask would suit rows of one document, but finding out synchronizes with the GPU.
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped, scale=options.scale)
    return mixed.transpose(1, 2)


def _attend_by_scores(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, options: AttentionOptions, sinks: Tensor | None
) -> Tensor:
    """Return attention_eager, computed from all scores (rows, kv_heads, group, length, keys) in at least float32."""
    by_key_head = upcast(q).reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = torch.einsum("rqkgd,rskd->rkgqs", by_key_head, upcast(k)) * options.scale_for(q.shape[-1])
    if options.softcap is not None:
        scores = options.softcap * (scores / options.softcap).tanh()
    scores = scores.masked_fill(~mask[:, :, None], -torch.inf)
    if sinks is not None:
        sink = upcast(sinks).view(1, k.shape[2], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], -1)
    weights = scores.softmax(-1)[..., : k.shape[1]]
    return torch.einsum("rkgqs,rskd->rqkgd", weights, upcast(v)).flatten(2, 3).to(q.dtype)


def create_causal_document_mask(
    document_ids: Tensor, window: int | None = None, queries: Tensor | None = None
) -> Tensor:
    """
    Return the keys that queries attend to: bool (rows, 1, queries, keys) from document ids int64 (rows, length).

    `queries`, int64 (tokens,), are the queries' positions in the row; default: all.
    """
    mask = (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril_()
    mask = mask if window is None else mask.triu_(1 - window)
    return mask if queries is None else mask.index_select(2, queries)


def create_causal_mask(
    queries: int, keys: int, window: int | None, device: torch.device, key_count: Tensor | None = None
) -> Tensor:
    """
    Return the keys, at most `window`, that the last tokens of a text attend to: bool (1, 1, queries, keys).

    The text has `keys` tokens, or the first `key_count` of them, int64 () on `device`.
    """
    key = torch.arange(keys, device=device)
    query = torch.arange(queries, device=device)[:, None] + (keys if key_count is None else key_count) - queries
    mask = key <= query
    return (mask if window is None else mask & (key > query - window))[None, None]


EAGER = AttentionImplementation(create_causal_document_mask, attention_eager)
