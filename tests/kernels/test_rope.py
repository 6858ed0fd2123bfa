"""rope against turning complex numbers."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.rope import rope_eager


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """The same rotation by complex numbers: channel i is the real part, channel i + half the imaginary one."""
    real, imaginary = x.double().chunk(2, -1)
    result = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
    return torch.cat((result.real, result.imag), -1)


def angles_of(rows: int, length: int, half: int) -> Tensor:
    return torch.rand(rows, length, half, dtype=torch.float64) * 100


@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (1, 1, 1, 2), (0, 4, 2, 6), (3, 0, 2, 4)])
def test_turns_pairs_of_channels(shape: tuple[int, int, int, int]) -> None:
    """Every shape, zero rows included, is turned as complex numbers are."""
    x, angles = torch.randn(shape), angles_of(shape[0], shape[1], shape[3] // 2)
    found = rope_eager(x, angles.cos().float(), angles.sin().float())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), turned(x, angles), atol=1e-6, rtol=1e-5)


def test_gradients() -> None:
    """Gradients, and gradients of gradients, are those of finite differences in float64."""
    x, angles = torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True), angles_of(2, 3, 2)
    assert torch.autograd.gradcheck(lambda x: rope_eager(x, angles.cos(), angles.sin()), (x,))
    assert torch.autograd.gradgradcheck(lambda x: rope_eager(x, angles.cos(), angles.sin()), (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_half_precision_once(dtype: torch.dtype) -> None:
    """With float32 angles, half precision gives the exact result rounded once, and such a gradient."""
    x, angles = torch.randn(2, 16, 3, 8).to(dtype).requires_grad_(), angles_of(2, 16, 4)
    cos, sin = angles.cos().float(), angles.sin().float()
    found, exact = rope_eager(x, cos, sin), turned(x, angles)
    (grad,) = torch.autograd.grad(found, x, torch.ones_like(found))
    (exact_grad,) = torch.autograd.grad(exact, x, torch.ones_like(exact))
    assert found.dtype == grad.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert ((found.double() - exact).abs() <= exact.abs() * eps * 0.51 + 1e-6).all()
    torch.testing.assert_close(grad.double(), exact_grad.double(), atol=1e-6, rtol=eps)


def test_strided_input() -> None:
    """A view with heads before length, and a gradient of the same kind, give what their copies give."""
    x, angles = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True), angles_of(2, 5, 4)
    found = rope_eager(x.transpose(1, 2), angles.cos(), angles.sin())
    torch.testing.assert_close(found, turned(x.transpose(1, 2), angles))
    weights = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    (grad,) = torch.autograd.grad((found.transpose(1, 2) * weights).sum(), x)
    (expected,) = torch.autograd.grad((turned(x.transpose(1, 2), angles).transpose(1, 2) * weights).sum(), x)
    torch.testing.assert_close(grad, expected)
