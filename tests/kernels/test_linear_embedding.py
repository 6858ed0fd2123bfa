"""embedding against torch's, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from drawloom.kernels.deferred_grads import Deferral
from drawloom.kernels.linear import embedding_eager


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (5,), (3, 4), (2, 3, 4), (0,), (2, 0)])
def test_equals_torch(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Output and gradient are those of torch.nn.functional.embedding, repeated tokens and none included."""
    tokens = torch.randint(6, shape, dtype=dtype)
    weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    found, expected = embedding_eager(tokens, weight), F.embedding(tokens, weight)
    assert torch.equal(found, expected)
    grad = torch.randn_like(expected)
    assert torch.equal(*(torch.autograd.grad(each, weight, grad)[0] for each in (found, expected)))


def test_frozen() -> None:
    """A frozen table gives a tensor without a graph."""
    assert embedding_eager(torch.tensor([1, 2]), torch.randn(6, 5)).grad_fn is None


def test_weight_gradient_can_be_deferred() -> None:
    """The deferred gradient of the table is bitwise the one that is computed at once."""
    tokens, weight = torch.randint(6, (3, 4)), torch.randn(6, 5, requires_grad=True)
    grad = torch.randn(3, 4, 5)
    (expected,) = torch.autograd.grad(embedding_eager(tokens, weight), weight, grad)
    deferral = Deferral()
    with deferral.recording():
        found = embedding_eager(tokens, weight)
    with deferral.defer():
        (found_now,) = torch.autograd.grad(found, weight, grad, allow_unused=True)
    assert found_now is None
    (deferred,) = deferral.take()
    assert torch.equal(deferred.compute(), expected)
