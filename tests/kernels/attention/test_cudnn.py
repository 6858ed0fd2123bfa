"""Attention over rows with one document, against eager attention with a dense mask."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.attention.cudnn import CUDNN, ONE_DOCUMENT_PER_ROW
from drawloom.kernels.attention.eager import attention_eager, create_causal_document_mask
from drawloom.kernels.attention.flash import SoftmaxStatistics, attend_with_optional_sinks
from drawloom.kernels.attention.options import AttentionOptions
from drawloom.kernels.attention.pieces import PiecewiseKernel, RowPieces
from support.kernels import DEVICE
from support.qwen3 import cpu_kernels
from support.row_pieces import ImaginaryRanks

HALF = DEVICE.type == "cuda"
"""Whether cuDNN runs, which computes in 16 bits; on a CPU torch uses another implementation."""


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (4, 2, 128), (3, 1, 8)])
def test_whole_rows_equal_eager(heads: int, kv_heads: int, head_dim: int) -> None:
    """Results and gradients equal attention with a dense mask, for any grouping of heads."""
    dtype, tolerance = (torch.bfloat16, 0.03) if HALF else (torch.float32, 1e-5)
    documents = torch.full((2, 300), 7, device=DEVICE)
    q, k, v = (
        torch.randn(2, 300, count, head_dim, device=DEVICE, dtype=dtype, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )
    actual, expected = (
        CUDNN.attend(q, k, v, ONE_DOCUMENT_PER_ROW),
        attention_eager(q, k, v, create_causal_document_mask(documents)),
    )
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    seed = torch.randn_like(actual)
    grads = (torch.autograd.grad(output, (q, k, v), seed) for output in (actual, expected))
    torch.testing.assert_close(*grads, atol=2 * tolerance, rtol=2 * tolerance)


class ScoresKernel:
    """Attention with statistics in plain torch, for (rows, tokens, heads, dim) with equal heads."""

    def __init__(self, causal: bool) -> None:
        self.causal = causal

    def compute_scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = torch.einsum("rqhd,rkhd->rqhk", q, k)
        visible = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device)
        return scores.masked_fill(~visible.tril()[:, None], -torch.inf) if self.causal else scores

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, SoftmaxStatistics]:
        lse = (scores := self.compute_scores(q, k)).logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        return torch.einsum("rqhk,rkhd->rqhd", weights, v), SoftmaxStatistics(lse, (lse[0, 0], lse[0, 0]))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixed: Tensor, statistics: SoftmaxStatistics
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = (self.compute_scores(q, k) - statistics.lse[..., None]).exp()
        along = torch.einsum("rqhd,rkhd->rqhk", grad, v) - (grad * mixed).sum(-1, keepdim=True)
        grad_scores = weights * along
        grads = ("rqhk,rkhd->rqhd", grad_scores, k), ("rqhk,rqhd->rkhd", grad_scores, q)
        grad_q, grad_k = (torch.einsum(*products) for products in grads)
        return grad_q, grad_k, torch.einsum("rqhk,rqhd->rkhd", weights, grad)


@pytest.mark.parametrize("indices", [(0, 3), (1, 2), (2,), (0,), (0, 1, 2, 3)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_pieces_equal_their_queries_in_whole_rows(indices: tuple[int, ...], has_sinks: bool) -> None:
    """Pieces' results and gradients, and the addends sent to other ranks, equal eager attention in whole rows."""
    shape = (2, 4 * 6, 2, 8)
    whole = q, k, v = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    exchange = ImaginaryRanks(indices, 4, torch.cat([k.flatten(2), v.flatten(2)], 2))
    own = exchange.token_indices
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True) if has_sinks else None
    parts = q_own, k_own, v_own = [x.detach()[:, own].requires_grad_() for x in whole]
    learned = [sinks] if sinks is not None else []
    kernel = PiecewiseKernel(ScoresKernel(causal=True), ScoresKernel(causal=False), exchange)
    visible = (own[:, None] >= torch.arange(shape[1])).expand(2, 1, -1, -1)
    options = AttentionOptions(scale=1.0)
    expected = attention_eager(q[:, own], k, v, visible, options, sinks)
    seed = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, [*whole, *learned], seed)
    expected_grads = [*(grad[:, own] for grad in grads[:3]), *grads[3:]]
    by_kernel = attend_with_optional_sinks(kernel, q_own, k_own, v_own, sinks)
    by_eager = CUDNN.attend(q_own, k_own, v_own, RowPieces(exchange), options, sinks)
    for result in (by_kernel, by_eager):
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(list(torch.autograd.grad(result, [*parts, *learned], seed)), expected_grads)
    torch.testing.assert_close(exchange.sent, torch.cat([x[:, exchange.others].flatten(2) for x in grads[1:3]], 2))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_packed_rows_and_windows_use_flex_attention() -> None:
    """The mask is flex_attention's unless each row is one document and there is no window."""
    kernels = cpu_kernels()
    kernels._functions["attention"] = CUDNN
    documents = torch.tensor([[0] * 30 + [1] * 34, [0] * 64], device=DEVICE)
    assert kernels.attention_mask(documents[1:], one_document_per_row=True) is ONE_DOCUMENT_PER_ROW
    for ids, window, whole in ((documents, None, False), (documents[1:], 5, True)):
        mask = kernels.attention_mask(ids, window, one_document_per_row=whole)
        q = torch.randn(len(ids), 64, 2, 16, device=DEVICE)
        with torch.no_grad():
            actual = CUDNN.attend(q, q, q, mask)
        expected = attention_eager(q, q, q, create_causal_document_mask(ids, window))
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


def test_the_compiler_traces_whole_rows() -> None:
    """A compiled block computes attention of whole rows in one graph, with the same result."""
    q = torch.randn(2, 64, 2, 16, device=DEVICE)
    compiled = torch.compile(lambda x: CUDNN.attend(x, x, x, ONE_DOCUMENT_PER_ROW), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q), CUDNN.attend(q, q, q, ONE_DOCUMENT_PER_ROW), atol=1e-5, rtol=1e-5)
