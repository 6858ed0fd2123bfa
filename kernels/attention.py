"""
Causal attention within documents: a token attends to itself and to earlier tokens of its document.

The mask is the same for all layers of a model, so it is made once for a microbatch and passed to each layer.
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
    An implementation of attention: `mask` makes what `attend` takes as its mask.

    `mask` takes document ids int64 (rows, length), and a window or None: tokens of a row with the same id are one
    document, of which a token attends to the last `window` before it, itself included. With `queries`, int64 (tokens,),
    the mask is for these tokens of each row as queries and all as keys. `attend` takes q (rows, tokens, heads,
    head_dim), k and v (rows, length, kv_heads, head_dim) and the mask, and returns (rows, tokens, heads, head_dim);
    kv_heads divides heads. `whole_rows`, if there is one, takes the place of a mask where each row is one document and
    there is no window.
    """

    mask: Callable[..., Any]
    attend: Callable[[Tensor, Tensor, Tensor, Any], Tensor]
    whole_rows: Any = None


def attention_eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """
    softmax(q k^T / sqrt(head_dim)) v with grouped queries, over the tokens that the mask allows.

    q (rows, length, heads, head_dim), k and v (rows, keys, kv_heads, head_dim), mask bool (rows, 1, length, keys) from
    `causal_document_mask` or `causal_mask`. Query head h attends to key head h // (heads // kv_heads). Returns
    (rows, length, heads, head_dim) in the dtype of q.
    """
    if q.is_meta:
        return attention_on_meta(q, k, v, mask)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    # torch's causal path without a mask would do for rows of one document, but to ask that synchronizes with the GPU.
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    return mixed.transpose(1, 2)


def causal_document_mask(document_ids: Tensor, window: int | None = None, queries: Tensor | None = None) -> Tensor:
    """
    The keys that each query attends to: bool (rows, 1, queries, keys) from document ids int64 (rows, length).

    `queries`, int64 (tokens,), are the places of the queries in the row; all if left out.
    """
    mask = (document_ids[:, None, :, None] == document_ids[:, None, None, :]).tril_()
    mask = mask if window is None else mask.triu_(1 - window)
    return mask if queries is None else mask.index_select(2, queries)


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """The keys that each of the last tokens of a text attends to, `window` at most: bool (1, 1, queries, keys)."""
    mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
    return mask if window is None else mask.triu_(keys - queries + 1 - window)


EAGER = AttentionImplementation(causal_document_mask, attention_eager)


def attention_on_meta(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """
    A meta tensor like q (rows, length, heads, head_dim), with k and v (rows, keys, kv_heads, head_dim).

    What it keeps for its backward pass, it takes from the implementations for GPUs and from torch's for the CPU; these
    keep a bool mask (rows, 1, length, keys), too, in the dtype of q.
    """
    return _OnMeta.apply(q, k, v, mask)  # type: ignore[no-untyped-call, no-any-return]


class _OnMeta(Function):
    """Saves queries, keys, values, the result, and one number by query and head."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """q (rows, length, heads, head_dim), k and v (rows, keys, kv_heads, head_dim); gives a tensor like q."""
        mixed, lse = torch.ops.drawloom.attention(q, k, v)
        ctx.save_for_backward(q, k, v, mixed, lse, None if mask is None else mask.to(q.dtype))
        return mixed  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *torch.ops.drawloom.attention_backward(grad, *ctx.saved_tensors[:3]), None


# Operators, so that those who count operations see one, and not what a meta tensor would be made by.
torch.library.define("drawloom::attention", "(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
torch.library.define("drawloom::attention_backward", "(Tensor grad, Tensor q, Tensor k, Tensor v) -> Tensor[]")


@torch.library.register_fake("drawloom::attention")  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)


@torch.library.register_fake("drawloom::attention_backward")  # type: ignore[untyped-decorator]
def _(grad: Tensor, *inputs: Tensor) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in inputs]


def attention_flops(queries: int, keys: int, *, backward: bool = False) -> float:
    """
    Return the FLOPs of attention to all pairs, given the number of elements of all queries, and of keys in a row.

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
    """Where documents begin in the flattened tokens, int32 (documents + 1,), and the window, if there is one."""

    offsets: Tensor
    window: int | None = None


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, mask: DocumentOffsets) -> Tensor:
    """
    The same as attention_eager, on GPUs, for bfloat16 and float16, if the tokens of each document are contiguous.

    q (rows, length, heads, head_dim), k and v (rows, length, kv_heads, head_dim), mask from `document_offsets`; returns
    (rows, length, heads, head_dim). Meta tensors give a meta tensor.
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
    # The length of a row bounds that of its documents, without asking the device for the longest.
    bounds = mask.offsets, mask.offsets, q.shape[1], q.shape[1]
    before = -1 if mask.window is None else mask.window - 1
    attend: Any = varlen_attn
    found: Tensor = attend(*(x.flatten(0, 1) for x in (q, k, v)), *bounds, window_size=(before, 0), **options)
    return found.view(q.shape)


def document_offsets(document_ids: Tensor, window: int | None = None, queries: Tensor | None = None) -> DocumentOffsets:
    """
    Where documents begin in the flattened tokens, then the number of tokens, cu_seqlens; and the window.

    document_ids int64 (rows, length); `queries` must be None, all tokens of each row. Synchronizes with the device, for
    the number of documents is the result's size; on the meta device the result has a size of 1.
    """
    if queries is not None:
        raise ValueError("torch's varlen_attn has no queries of a part of a document")
    if document_ids.is_meta:
        return DocumentOffsets(document_ids.new_empty(1, dtype=torch.int32), window)
    # The first token of a row always begins a document, also if the last row ended with the same id.
    changes = torch.ones_like(document_ids, dtype=torch.bool)
    changes[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    places = changes.flatten().nonzero().flatten()
    offsets = torch.cat((places, places.new_tensor([document_ids.numel()]))).to(torch.int32)
    return DocumentOffsets(offsets, window)


VARLEN = AttentionImplementation(document_offsets, attention_varlen)
