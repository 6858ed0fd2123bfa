"""
Attention by a kernel with statistics, and exact gradients for attention sinks.

A sink is a score for one more key, whose value is 0 (Xiao et al. 2023, "Efficient Streaming Language Models with
Attention Sinks", arXiv 2309.17453). It multiplies the result by sigmoid(lse - sink), where lse is the scores'
log-sum-exp, and changes lse to logaddexp(lse, sink). A backward pass with the new result and the new lse computes the
gradients with the sink: it needs only the weights exp(score - lse), and the product of the result with its gradient.

Causal attention by torch's flash attention, for rows with one document or with several contiguous ones.

The kernel takes one width for queries, keys and values, a multiple of 8 up to 256: other widths are padded with zeros.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from drawloom.kernels.attention.eager import AttentionImplementation, attention_on_meta
from drawloom.kernels.attention.options import PLAIN_ATTENTION, AttentionOptions
from drawloom.kernels.operation import once_differentiable


class SoftmaxStatistics(NamedTuple):
    """Log-sum-exp, float32 (..., heads) in the order of the result, and other tensors for the backward pass."""

    lse: Tensor
    kept: tuple[Tensor, ...]


class StatisticsKernel(Protocol):
    """Attention for (..., heads, dim) whose backward pass takes the result and the statistics."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, SoftmaxStatistics]:
        """Return the result (..., heads, v_dim) and its statistics."""

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, statistics: SoftmaxStatistics
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return gradients for q, k and v, given one for the result `mixed` (..., heads, v_dim)."""


def attend_with_optional_sinks(
    kernel: StatisticsKernel, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None
) -> Tensor:
    """Return attention (..., heads, v_dim) by a kernel, with sinks (heads,) if they are not None."""
    return _AttendWithStatistics.apply(q, k, v, sinks, kernel)  # type: ignore[no-untyped-call, no-any-return]


class _AttendWithStatistics(Function):
    """Autograd function for attention by a kernel; sinks scale its result and enter its log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, kernel: StatisticsKernel) -> Tensor:
        """Return (..., heads, v_dim) like q (..., heads, head_dim); sinks are (heads,)."""
        mixed, (lse, kept) = kernel.forward(q, k, v)
        if sinks is not None:
            mixed = mixed * (lse - sinks).sigmoid()[..., None].to(mixed.dtype)
            lse = torch.logaddexp(lse, sinks.to(lse.dtype))
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, mixed, lse, sinks, *kept)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, mixed, lse, sinks, *kept = ctx.saved_tensors
        grads = ctx.kernel.backward(grad, q, k, v, mixed, SoftmaxStatistics(lse, tuple(kept)))
        grad_sinks = _compute_sinks_gradient(grad, mixed, lse, sinks) if ctx.needs_input_grad[3] else None
        return *grads, grad_sinks, None


def _compute_sinks_gradient(grad: Tensor, mixed: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the sinks' gradient (heads,): minus their weights times the result's product with its gradient."""
    along = (grad.to(lse.dtype) * mixed).sum(-1)
    return -((sinks - lse).exp() * along).flatten(0, -2).sum(0).to(sinks.dtype)


MAX_WIDTH = 256
"""The widest head for torch's kernel."""

WIDTH_STEP = 8
"""The kernel's widths are multiples."""


class DocumentOffsets(NamedTuple):
    """Starts of documents in the flattened tokens, int32 (documents + 1,), and the window or None."""

    offsets: Tensor
    window: int | None = None


@dataclass(frozen=True)
class FlashKernel:
    """
    The flash attention inside torch, with its statistics.

    Tensors are (rows, length, heads, head_dim), or with `offsets` (tokens, heads, head_dim), for documents with at most
    `longest` tokens.
    """

    scale: float
    longest: int
    offsets: Tensor | None = None
    window: int | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, SoftmaxStatistics]:
        """Return the result (..., heads, head_dim), and the log-sum-exp (..., heads)."""
        mixed, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self._document_offsets_and_lengths, 0.0, self.window is None, False, **self._kernel_options
        )
        return mixed, SoftmaxStatistics(lse.transpose(-1, -2), (seed, offset))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, statistics: SoftmaxStatistics
    ) -> tuple[Tensor, Tensor, Tensor]:
        lse = statistics.lse.transpose(-1, -2).contiguous()
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            *(q, k, v, mixed, lse),
            *self._document_offsets_and_lengths,
            *(0.0, self.window is None),
            *statistics.kept,
            **self._kernel_options,
        )
        return grads

    @property
    def _document_offsets_and_lengths(self) -> tuple[Tensor | None, Tensor | None, int, int]:
        """Arguments for torch's flash attention: query and key offsets, and the longest query and key documents."""
        return self.offsets, self.offsets, self.longest, self.longest

    @property
    def _kernel_options(self) -> dict[str, float | None]:
        before = None if self.window is None else self.window - 1
        return {"scale": self.scale, "window_size_left": before, "window_size_right": None if before is None else 0}


def attention_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: DocumentOffsets | None,
    options: AttentionOptions = PLAIN_ATTENTION,
    sinks: Tensor | None = None,
) -> Tensor:
    """
    Compute attention_eager on GPUs, for bfloat16 and float16, for contiguous documents; None for one document per row.

    q (rows, length, heads, head_dim), k (rows, length, kv_heads, head_dim), v (rows, length, kv_heads, v_dim); returns
    (rows, length, heads, v_dim), a meta tensor for meta tensors. Raises ValueError for a softcap or wide heads.
    """
    if problem := why_not_flash(q, v, options):
        raise ValueError(f"torch's flash attention can't run: {problem}; choose the implementation 'flex'")
    if q.is_meta:
        return attention_on_meta(q, k, v, sinks=sinks)
    width = _pad_kernel_width(q, v)
    scale, (rows, length, heads, _) = options.scale_for(q.shape[-1]), q.shape
    v_dim = v.shape[-1]
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    if documents is None:
        return attend_with_optional_sinks(FlashKernel(scale, length), q, k, v, sinks)[..., :v_dim]
    # No document is longer than a row; the longest one is known only to the device.
    kernel = FlashKernel(scale, length, *documents)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return attend_with_optional_sinks(kernel, q, k, v, sinks).view(rows, length, heads, width)[..., :v_dim]


def why_not_flash(q: Tensor, v: Tensor, options: AttentionOptions) -> str:
    """Return the reason why flash attention can't process q and v (..., width) with these options; empty if it can."""
    if options.softcap is not None:
        return "it has no softcap"
    if _pad_kernel_width(q, v) > MAX_WIDTH:
        return f"heads are {max(q.shape[-1], v.shape[-1])} wide, and it accepts at most {MAX_WIDTH}"
    return ""


def _pad_kernel_width(q: Tensor, v: Tensor) -> int:
    widest = max(q.shape[-1], v.shape[-1])
    return -(-widest // WIDTH_STEP) * WIDTH_STEP


def compute_document_offsets(
    document_ids: Tensor, window: int | None = None, queries: Tensor | None = None
) -> DocumentOffsets:
    """
    Return the documents' starts in the flattened tokens, then the number of tokens (cu_seqlens), and the window.

    document_ids int64 (rows, length); `queries` must be None: all tokens. Synchronizes with the device, since
    the number of documents is the result's size; on the meta device the size is 1.
    """
    if queries is not None:
        raise ValueError(
            "torch's flash attention needs the queries of whole documents; choose the implementation 'flex'"
        )
    if document_ids.is_meta:
        return DocumentOffsets(document_ids.new_empty(1, dtype=torch.int32), window)
    # The first token of a row always begins a document, also if the last row ended with the same id.
    changes = torch.ones_like(document_ids, dtype=torch.bool)
    changes[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = changes.flatten().nonzero().flatten()
    offsets = torch.cat((starts, starts.new_tensor([document_ids.numel()]))).to(torch.int32)
    return DocumentOffsets(offsets, window)


VARLEN = AttentionImplementation(compute_document_offsets, attention_flash)
