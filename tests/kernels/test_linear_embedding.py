"""embedding against torch.nn.functional.embedding, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from drawloom.kernels import deferred_grads
from drawloom.kernels.deferral import Deferral
from drawloom.kernels.deferred_grads import Accumulation
from drawloom.kernels.linear import embedding_eager


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0,), (2, 0)])
def test_embedding_equals_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Output and gradient equal torch.nn.functional.embedding, also with repeated or no tokens."""
    tokens = torch.randint(6, shape, dtype=dtype)
    weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    actual, expected = embedding_eager(tokens, weight), F.embedding(tokens, weight)
    assert torch.equal(actual, expected)
    grad = torch.randn_like(expected)
    assert torch.equal(*(torch.autograd.grad(output, weight, grad)[0] for output in (actual, expected)))


def test_a_frozen_table_builds_no_graph() -> None:
    """A frozen table returns a tensor without a graph."""
    assert embedding_eager(torch.tensor([1, 2]), torch.randn(6, 5)).grad_fn is None


def test_weight_gradient_can_be_deferred() -> None:
    """A deferred table gradient is bitwise equal to an immediate one."""
    tokens, weight = torch.randint(6, (3, 4)), torch.randn(6, 5, requires_grad=True)
    grad = torch.randn(3, 4, 5)
    (expected,) = torch.autograd.grad(embedding_eager(tokens, weight), weight, grad)
    deferral = Deferral()
    with deferral:
        actual = embedding_eager(tokens, weight)
    with deferral.defer():
        (found_now,) = torch.autograd.grad(actual, weight, grad, allow_unused=True)
    assert found_now is None
    (deferred,) = deferral.take_queued_gradients()
    assert torch.equal(deferred.drain_and_return_remaining_grad(), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (5,), (3, 40), (2, 3, 4), (0,), (2, 0)])
def test_rows_are_added_to_the_gradient(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradient accumulation sums rows in float32, and rows without tokens do not change."""
    monkeypatch.setattr(deferred_grads, "FUSED", {"cpu"})
    weight = torch.nn.Parameter(torch.randn(9, 5).bfloat16())
    weight.grad_dtype = torch.float32
    expected, before = torch.zeros(9, 5), None
    for _ in range(3):
        tokens = torch.randint(2, 8, shape, dtype=dtype)
        with Accumulation():
            actual = embedding_eager(tokens, weight)
        grad = torch.randn(*shape, 5).bfloat16()
        actual.backward(grad)  # type: ignore[no-untyped-call]
        expected.index_add_(0, tokens.reshape(-1), grad.reshape(-1, 5).float())
        assert weight.grad is not None and before in (None, weight.grad.data_ptr())
        before = weight.grad.data_ptr()
    torch.testing.assert_close(weight.grad, expected, rtol=1e-5, atol=1e-6)
