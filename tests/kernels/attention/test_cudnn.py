"""Attention over rows with one document, against eager attention with a dense mask."""

import pytest
import torch

from drawloom.kernels.attention.cudnn import CUDNN, ONE_DOCUMENT_PER_ROW
from drawloom.kernels.attention.eager import attention_eager, create_causal_document_mask
from support.kernels import DEVICE
from support.qwen3 import cpu_kernels

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


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_packed_rows_and_windows_use_flex_attention() -> None:
    """The mask is flex_attention's unless each row is one document and there is no window."""
    kernels = cpu_kernels()
    kernels._functions_by_operation["attention"] = CUDNN
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
