"""Causal attention inside documents by torch's flash attention over sequences of different lengths."""

from inspect import signature
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from drawloom.kernels.attention import attention_eager


class AttentionVarlen:
    """
    What attention_eager gives, on GPUs, for bfloat16 and float16, where each document's tokens follow one another.

    Where documents begin is asked of the device once for each tensor of documents, which waits for it; layers that
    are given the same tensor share the answer.
    """

    def __init__(self) -> None:
        self._documents: ref[Tensor] | None = None
        self._begins = torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        if q.is_meta:
            return attention_eager(q, k, v, documents)
        from torch.nn.attention.varlen import varlen_attn

        if self._documents is None or self._documents() is not documents:
            self._documents, self._begins = ref(documents), begins(documents)
        length, options = documents.shape[1], {}
        if q.shape[2] != k.shape[2]:
            if "enable_gqa" in signature(varlen_attn).parameters:
                options["enable_gqa"] = True
            else:  # torch 2.11
                k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for x in (k, v))
        flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
        # No document is longer than its row: that is known without asking.
        bounds = self._begins, self._begins, length, length
        attend: Any = varlen_attn
        found: Tensor = attend(flat_q, flat_k, flat_v, *bounds, window_size=(-1, 0), **options)
        return found.view(q.shape)


def begins(documents: Tensor) -> Tensor:
    """Where each document of (rows, length) begins in all tokens, then how many there are: int32 (documents + 1,)."""
    changes = torch.ones_like(documents, dtype=torch.bool)
    changes[:, 1:] = documents[:, 1:] != documents[:, :-1]
    places = changes.flatten().nonzero().flatten()
    return torch.cat((places, places.new_tensor([documents.numel()]))).to(torch.int32)
