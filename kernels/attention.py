"""
Causal attention within documents: a token attends to itself and to earlier tokens of its document.

All layers of a model have the same mask, so it is computed once per microbatch and passed to each layer.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.costs import no_scratch, register_costs
from drawloom.kernels.operation import once_differentiable


class AttentionImplementation(NamedTuple):
    """
    Implementation of attention: `mask` computes the mask that `attend` takes.

    `mask` takes document ids int64 (rows, length), and a window or None: tokens of a row with the same id are one
    document, and a token attends to the last `window` tokens of its document, itself included. With `queries`, int64
    (tokens,), the queries are the tokens of each row at these positions, and all tokens are keys. `attend` takes q
    (rows, tokens, heads, head_dim), k and v (rows, length, kv_heads, head_dim) and the mask, and returns (rows, tokens,
    heads, head_dim); kv_heads divides heads. `whole_rows`, if it is not None, replaces the mask where each row is one
    document and there is no window.
    """

    mask: Callable[..., Any]
    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    whole_rows: Any = None


def attention_eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """
    Compute softmax(q k^T / sqrt(head_dim)) v with grouped queries, over the tokens that the mask allows.

    q (rows, length, heads, head_dim), k and v (rows, keys, kv_heads, head_dim), mask bool (rows, 1, length, keys) from
    `causal_document_mask` or `causal_mask`. Query head h attends to key head h // (heads // kv_heads). Returns
    (rows, length, heads, head_dim) in the dtype of q.
    """
    if q.is_meta:
        return attention_on_meta(q, k, v, mask)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    # torch's causal path without a mask would suit rows of one document, but finding out synchronizes with the GPU.
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return mixed.transpose(1, 2)


def causal_document_mask(document_ids: Tensor, window: int | None = None, queries: Tensor | None = None) -> Tensor:
    """
    Return the keys that queries attend to: bool (rows, 1, queries, keys) from document ids int64 (rows, length).

    `queries`, int64 (tokens,), are the positions of the queries in the row; default: all.
    """
    mask = (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril_()
    mask = mask if window is None else mask.triu_(1 - window)
    return mask if queries is None else mask.index_select(2, queries)


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the keys, at most `window`, that the last tokens of a text attend to: bool (1, 1, queries, keys)."""
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return mask if window is None else mask.triu_(keys - queries + 1 - window)


EAGER = AttentionImplementation(causal_document_mask, attention_eager)


def attention_on_meta(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """
    Return a meta tensor like q (rows, length, heads, head_dim), with k and v (rows, keys, kv_heads, head_dim).

    It keeps the same tensors for the backward pass as the implementations for GPUs and torch's for the CPU; the latter
    also keeps a bool mask (rows, 1, length, keys), in the dtype of q.
    """
    return _OnMeta.apply(q, k, v, mask)  # type: ignore[no-untyped-call, no-any-return]


class _OnMeta(Function):
    """Attention on the meta device; saves queries, keys, values, the result, and one number per query and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return a tensor like q (rows, length, heads, head_dim); k and v are (rows, keys, kv_heads, head_dim)."""
        mixed, lse = torch.ops.drawloom.attention(q, k, v)
        ctx.save_for_backward(q, k, v, mixed, lse, None if mask is None else mask.to(q.dtype))
        return mixed  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *torch.ops.drawloom.attention_backward(grad, *ctx.saved_tensors[:3]), None


# Operators, so that a program that counts operations sees attention, and not the allocation of a meta tensor.
torch.library.define("drawloom::attention", "(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
torch.library.define("drawloom::attention_backward", "(Tensor grad, Tensor q, Tensor k, Tensor v) -> Tensor[]")


@torch.library.register_fake("drawloom::attention")  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


@torch.library.register_fake("drawloom::attention_backward")  # type: ignore[untyped-decorator]
def _(grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in inputs]


def attention_flops(queries: int, keys: int, *, backward: bool = False) -> float:
    """
    Return the FLOPs of attention to all pairs, for `queries` elements in all queries and `keys` keys per row.

    A backward pass computes the scores again: five products, where the forward pass has two.
    """
    return (10.0 if backward else 4.0) * queries * keys


def _forward_flops(q: Tensor, k: Tensor) -> float:
    return attention_flops(q.numel(), k.shape[1])


def _backward_flops(q: Tensor, k: Tensor) -> float:
    return attention_flops(q.numel(), k.shape[1], backward=True)


def _backward_scratch(q: Tensor, k: Tensor) -> int:
    # cuDNN sums gradients of queries in float32, and computes gradients of keys and values for each head of queries.
    return q.numel() * 4 + (2 * q.nbytes if k.shape[2] < q.shape[2] else 0)


register_costs(torch.ops.drawloom.attention, flops=_forward_flops, scratch=no_scratch, is_attention=True)
register_costs(
    torch.ops.drawloom.attention_backward, flops=_backward_flops, scratch=_backward_scratch, is_attention=True
)


class DocumentOffsets(NamedTuple):
    """Start of each document in the flattened tokens, int32 (documents + 1,), and the window or None."""

    offsets: Tensor
    window: int | None = None


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, mask: DocumentOffsets) -> Tensor:
    """
    Compute attention_eager on GPUs, for bfloat16 and float16, if the tokens of each document are contiguous.

    q (rows, length, heads, head_dim), k and v (rows, length, kv_heads, head_dim), mask from `document_offsets`; returns
    (rows, length, heads, head_dim). Returns a meta tensor for meta tensors.
    """
    if q.is_meta:
        return attention_on_meta(q, k, v)
    from torch.nn.attention.varlen import varlen_attn

    options = {}
    if q.shape[2] != k.shape[2]:
        if "enable_gqa" in signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:  # torch 2.11 has no grouped queries here
            k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    # No document is longer than a row; the longest one is known only to the device.
    bounds = mask.offsets, mask.offsets, q.shape[1], q.shape[1]
    before = -1 if mask.window is None else mask.window - 1
    attend: Any = varlen_attn
    mixed: Tensor = attend(*(x.flatten(0, 1) for x in (q, k, v)), *bounds, window_size=(before, 0), **options)
    return mixed.view(q.shape)


def document_offsets(document_ids: Tensor, window: int | None = None, queries: Tensor | None = None) -> DocumentOffsets:
    """
    Return the documents' starts in the flattened tokens, then the number of tokens (cu_seqlens), and the window.

    document_ids int64 (rows, length); `queries` must be None: all tokens of each row. Synchronizes with the device,
    since the number of documents is the size of the result; on the meta device the size is 1.
    """
    if queries is not None:
        raise ValueError("torch's varlen_attn does not accept queries of a part of a document")
    if document_ids.is_meta:
        return DocumentOffsets(document_ids.new_empty(1, dtype=torch.int32), window)
    # The first token of a row always begins a document, also if the last row ended with the same id.
    changes = torch.ones_like(document_ids, dtype=torch.bool)
    changes[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = changes.flatten().nonzero().flatten()
    offsets = torch.cat((starts, starts.new_tensor([document_ids.numel()]))).to(torch.int32)
    return DocumentOffsets(offsets, window)


VARLEN = AttentionImplementation(document_offsets, attention_varlen)
