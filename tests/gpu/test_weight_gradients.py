"""Weight gradients on a GPU: bfloat16 products accumulated in float32 in their epilogue."""

import pytest
import torch
from torch import nn

from drawloom.kernels.cross_entropy.triton import linear_cross_entropy_triton
from drawloom.kernels.deferred_grads import Accumulation
from drawloom.kernels.linear import linear_eager

pytestmark = pytest.mark.gpu


def _weight(*shape: int) -> nn.Parameter:
    weight = nn.Parameter((torch.randn(shape, device="cuda") * 0.1).bfloat16())
    weight.grad_dtype = torch.float32
    return weight


def test_linear_products_are_summed_in_float32() -> None:
    """Gradients of three microbatches are accumulated in one float32 tensor, more exactly than in bfloat16."""
    torch.manual_seed(0)
    linear = _weight(96, 64)
    inputs = [torch.randn(128, 64, device="cuda").bfloat16() for _ in range(3)]
    grads = [torch.randn(128, 96, device="cuda").bfloat16() for _ in inputs]
    addresses = set()
    for x, grad in zip(inputs, grads, strict=True):
        with Accumulation():
            y = linear_eager(x, linear)
        y.backward(grad)  # type: ignore[no-untyped-call]
        assert linear.grad is not None and linear.grad.dtype == torch.float32
        addresses.add(linear.grad.data_ptr())
    expected = sum(grad.double().T @ x.double() for x, grad in zip(inputs, grads, strict=True))
    assert isinstance(expected, torch.Tensor) and linear.grad is not None
    assert ((linear.grad.double() - expected).norm() / expected.norm()).item() < 1e-5 and len(addresses) == 1


def test_cross_entropy_accumulates_its_weight_gradient() -> None:
    """The head's gradient after two microbatches equals autograd's sum up to rounding."""
    torch.manual_seed(0)
    head, other = _weight(512, 64), _weight(512, 64)
    other.data.copy_(head.data)
    for _ in range(2):
        hidden, targets = torch.randn(32, 64, device="cuda").bfloat16(), torch.randint(512, (32,), device="cuda")
        with Accumulation():
            losses, _ = linear_cross_entropy_triton(hidden, head, targets)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        linear_cross_entropy_triton(hidden, other, targets)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert head.grad is not None and other.grad is not None
    assert ((head.grad - other.grad).norm() / other.grad.norm()).item() < 2**-8
