"""Offsets of documents, and attention over documents on a GPU."""

import pytest
import torch

from drawloom.kernels.attention.eager import attention_eager, create_causal_document_mask
from drawloom.kernels.attention.flash import attention_flash, compute_document_offsets


def test_documents_begin_where_ids_or_rows_change() -> None:
    """A document begins where the id changes or a row begins; the last offset is the number of tokens."""
    document_ids = torch.tensor([[0, 0, 1, 1], [1, 2, 2, 3]])
    assert compute_document_offsets(document_ids).offsets.tolist() == [0, 2, 4, 5, 7, 8]
    assert compute_document_offsets(document_ids).offsets.dtype == torch.int32
    assert compute_document_offsets(document_ids[:0]).offsets.tolist() == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_varlen_attention_equals_eager(kv_heads: int) -> None:
    """Results and gradients equal the eager implementation's, for documents of any number and length."""
    for _ in range(2):
        document_ids = torch.randint(2, (2, 300)).cumsum(1).cuda()
        q = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k, v = (
            torch.randn(2, 300, kv_heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv"
        )
        actual, expected = (
            attention_flash(q, k, v, compute_document_offsets(document_ids)),
            attention_eager(q, k, v, create_causal_document_mask(document_ids)),
        )
        torch.testing.assert_close(actual, expected, atol=0.02, rtol=0.02)
        grads = torch.autograd.grad(actual.sum(), (q, k, v))
        torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), (q, k, v)), atol=0.05, rtol=0.05)
