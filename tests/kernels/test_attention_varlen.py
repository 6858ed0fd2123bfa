"""Where documents begin, and attention over them on a GPU."""

import pytest
import torch

from drawloom.kernels.attention import attention_eager, visible
from drawloom.kernels.attention_varlen import attention_varlen, begins


def test_begins() -> None:
    """Documents begin where the number changes and where a row begins, whatever its number; the end comes last."""
    documents = torch.tensor([[0, 0, 1, 1], [1, 2, 2, 3]])
    assert begins(documents).tolist() == [0, 2, 4, 5, 7, 8]
    assert begins(documents).dtype == torch.int32
    assert begins(documents[:0]).tolist() == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_equals_eager(kv_heads: int) -> None:
    """Results and gradients are those of the eager twin, for documents of any number and length."""
    for _ in range(2):
        documents = torch.randint(2, (2, 300)).cumsum(1).cuda()
        q = torch.randn(2, 300, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k, v = (
            torch.randn(2, 300, kv_heads, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in "kv"
        )
        found, expected = attention_varlen(q, k, v, begins(documents)), attention_eager(q, k, v, visible(documents))
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
        grads = torch.autograd.grad(found.sum(), (q, k, v))
        torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), (q, k, v)), atol=0.05, rtol=0.05)
