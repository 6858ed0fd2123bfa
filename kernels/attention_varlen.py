"""Causal attention inside documents by torch's flash attention over sequences of different lengths."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from drawloom.kernels.attention import Implementation, attention_on_meta


def attention_varlen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """
    What attention_eager gives, on GPUs, for bfloat16 and float16, where each document's tokens follow one another.

    The mask is where documents begin, as `begins` gives it. Tensors on the meta device give one of the right shape.
    """
    if q.is_meta:
        return attention_on_meta(q, k, v)
    from torch.nn.attention.varlen import varlen_attn

    options = {}
    if q.shape[2] != k.shape[2]:
        if "enable_gqa" in signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:  # torch 2.11
            k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
    # No document is longer than its row: that is known without asking.
    bounds = mask, mask, q.shape[1], q.shape[1]
    attend: Any = varlen_attn
    found: Tensor = attend(*(x.flatten(0, 1) for x in (q, k, v)), *bounds, window_size=(-1, 0), **options)
    return found.view(q.shape)


def begins(documents: Tensor) -> Tensor:
    """
    Where each document of (rows, length) begins in all tokens, then how many tokens there are: int32 (documents + 1,).

    How many documents there are is asked of the device, which is waited for; on the meta device there is none.
    """
    if documents.is_meta:
        return documents.new_empty(1, dtype=torch.int32)
    changes = torch.ones_like(documents, dtype=torch.bool)
    changes[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = changes.flatten().nonzero().flatten()
    return torch.cat((places, places.new_tensor([documents.numel()]))).to(torch.int32)


VARLEN = Implementation(begins, attention_varlen)
