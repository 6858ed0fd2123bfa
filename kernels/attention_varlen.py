"""Causal attention within documents by torch's variable-length flash attention (varlen_attn)."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from drawloom.kernels.attention import Implementation, attention_on_meta


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """
    The same as attention_eager, on GPUs, for bfloat16 and float16, if the tokens of each document are contiguous.

    q (rows, length, heads, head_dim), k and v (rows, length, kv_heads, head_dim), mask int32 (documents + 1,) from
    `document_offsets`; returns (rows, length, heads, head_dim). Meta tensors give a meta tensor.
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
    bounds = mask, mask, q.shape[1], q.shape[1]
    attend: Any = varlen_attn
    found: Tensor = attend(*(x.flatten(0, 1) for x in (q, k, v)), *bounds, window_size=(-1, 0), **options)
    return found.view(q.shape)


def document_offsets(document_ids: Tensor) -> Tensor:
    """
    Where documents begin in the flattened tokens, then the number of tokens: int32 (documents + 1,), cu_seqlens.

    document_ids int64 (rows, length). Synchronizes with the device, for the number of documents is the result's size;
    on the meta device the result has a size of 1.
    """
    if document_ids.is_meta:
        return document_ids.new_empty(1, dtype=torch.int32)
    # The first token of a row always begins a document, also if the last row ended with the same id.
    changes = torch.ones_like(document_ids, dtype=torch.bool)
    changes[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    places = changes.flatten().nonzero().flatten()
    return torch.cat((places, places.new_tensor([document_ids.numel()]))).to(torch.int32)


VARLEN = Implementation(document_offsets, attention_varlen)
