"""
Causal attention by cuDNN for rows of one document each, and by flex_attention for all others.

cuDNN does not support documents within a row, and takes about 60 % of flex_attention's time on Hopper. Where it can't
be used (because of head_dim, dtype, GPU, or torch's deterministic algorithms), torch picks its next implementation.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from drawloom.kernels.attention.eager import (
    AttentionImplementation,
    attention_eager,
    attention_on_meta,
    create_causal_mask,
)
from drawloom.kernels.attention.flash import (
    SoftmaxStatistics,
    attend_with_optional_sinks,
    attention_flash,
    why_not_flash,
)
from drawloom.kernels.attention.flex import FLEX, create_document_block_mask
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions
from drawloom.kernels.attention.pieces import PiecewiseKernel, RowPieces, gather_keys_and_values
from drawloom.kernels.results import RowPart

ONE_DOCUMENT_PER_ROW = "whole rows"
"""Value for the mask if every row is one document."""


ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Priority of implementations: cuDNN, and then torch's own order."""

ImplementationName = Literal["cudnn", "flash", "torch", "flex", "eager"]


def attention_cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    options: AttentionOptions = PLAIN_ATTENTION,
    sinks: Tensor | None = None,
) -> Tensor:
    """
    Compute attention_eager with ONE_DOCUMENT_PER_ROW, RowPieces or a mask from `create_document_block_mask`.

    q (rows, tokens, heads, head_dim), k (rows, length, kv_heads, head_dim), v (rows, length, kv_heads, v_dim); returns
    (rows, tokens, heads, v_dim), a meta tensor for meta tensors.
    """
    if mask is not ONE_DOCUMENT_PER_ROW and not isinstance(mask, RowPieces):
        return FLEX.attend(q, k, v, mask, options, sinks)
    if isinstance(mask, RowPieces):
        return _attend_from_pieces(q, k, v, mask.part, options, sinks)
    if q.is_meta:
        return attention_on_meta(q, k, v, sinks=sinks)
    server = choose_one_document_implementation(q, k, v, options, sinks)
    if server == "flash":
        return attention_flash(q, k, v, None, options, sinks)
    if server == "flex":
        documents = torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device)
        return FLEX.attend(q, k, v, create_document_block_mask(documents), options, sinks)
    if server == "eager":
        return attention_eager(q, k, v, create_causal_mask(q.shape[1], q.shape[1], None, q.device), options, sinks)
    if sinks is not None:
        return attend_with_optional_sinks(CudnnKernel(options.scale), q, k, v, sinks)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return _attend_by_cudnn_or_torch(q, k, v, options.scale, server == "cudnn").transpose(1, 2)


def _attend_from_pieces(
    q: Tensor, k: Tensor, v: Tensor, part: RowPart, options: AttentionOptions, sinks: Tensor | None
) -> Tensor:
    """Compute attention_cudnn with RowPieces, by cuDNN if it can serve these tokens; k and v are this rank's tokens."""
    if not q.is_meta and choose_one_document_implementation(q, k, v, options, sinks) == "cudnn":
        kernel = PiecewiseKernel(CudnnKernel(options.scale), CudnnKernel(options.scale, False), part)
        return attend_with_optional_sinks(kernel, q, k, v, sinks)
    k, v = gather_keys_and_values(part, k, v)
    if q.is_meta:
        return attention_on_meta(q, k, v, sinks=sinks)
    if q.is_cuda or torch.compiler.is_compiling():
        documents = torch.zeros(k.shape[:2], dtype=torch.int64, device=q.device)
        return FLEX.attend(q, k, v, create_document_block_mask(documents, None, part.token_indices), options, sinks)
    visible = part.token_indices[:, None] >= torch.arange(k.shape[1])
    return attention_eager(q, k, v, visible.expand(len(q), 1, -1, -1), options, sinks)


def choose_one_document_implementation(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions = PLAIN_ATTENTION, sinks: Tensor | None = None
) -> ImplementationName:
    """
    Return the implementation for rows with one document: "torch" is torch's own choice.

    q (rows, length, heads, head_dim), k (rows, length, kv_heads, head_dim), v (rows, length, kv_heads, v_dim). cuDNN
    and flash attention have no softcap; for sinks they return statistics, but torch does not.
    """
    is_compiling = torch.compiler.is_compiling()
    if options.softcap is not None or (sinks is not None and is_compiling):
        return "flex" if q.is_cuda or is_compiling else "eager"
    if is_compiling:
        return "torch"  # the compiler can't trace the checks below
    grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    params = SDPAParams(q, k, v, None, 0.0, True, grouped)
    if q.is_cuda and can_use_cudnn_attention(params):
        return "cudnn"
    if sinks is None:
        return "torch"
    if not q.is_cuda:
        return "eager"
    return "flash" if can_use_flash_attention(params) and not why_not_flash(q, v, options) else "flex"


def _attend_by_cudnn_or_torch(q: Tensor, k: Tensor, v: Tensor, scale: float | None, has_cudnn: bool) -> Tensor:
    """Return causal attention like q (rows, heads, length, head_dim), to k and v (rows, kv_heads, length, width)."""
    grouped = q.shape[1] != k.shape[1]
    if torch.compiler.is_compiling():
        # The compiler enters the context once, while it compiles.
        with sdpa_kernel(ORDER, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped, scale=scale)
    # torch would do the same within that context, but entering it takes the host as long as the attention itself.
    if has_cudnn:
        learned = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        mixed: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, learned, is_causal=True, scale=scale
        )[0]
        return mixed
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped, scale=scale)


@dataclass(frozen=True)
class CudnnKernel:
    """
    cuDNN's attention and statistics for rows with one document; tensors are (rows, length, heads, dim).

    If it is not causal, there may be other keys than queries, and all queries attend to all keys.
    """

    scale: float | None
    causal: bool = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, SoftmaxStatistics]:
        """Return the result (rows, length, heads, v_dim), and the log-sum-exp (rows, length, heads)."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        results = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            q, k, v, None, True, is_causal=self.causal, scale=self.scale
        )
        lse = results[1].view(q.shape[:3])
        return results[0].transpose(1, 2), SoftmaxStatistics(lse.transpose(1, 2), (results[6], results[7]))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, statistics: SoftmaxStatistics
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, mixed = (x.transpose(1, 2) for x in (grad, q, k, v, mixed))
        lse = statistics.lse.transpose(1, 2).contiguous()[..., None]
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default(
            *(grad, q, k, v, mixed, lse),
            *statistics.kept,
            *(None, None, None, q.shape[2], k.shape[2], 0.0, self.causal),
            scale=self.scale,
        )
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
        return grad_q, grad_k, grad_v


CUDNN = AttentionImplementation(FLEX.mask, attention_cudnn, ONE_DOCUMENT_PER_ROW, RowPieces)
