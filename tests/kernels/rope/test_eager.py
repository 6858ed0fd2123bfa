"""rope against the multiplication of complex numbers."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drawloom.kernels.rope.eager import rope_eager


def rotate_complex(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate by complex numbers: channel i is the real part, channel i + half the imaginary part."""
    real, imaginary = x.double().chunk(2, -1)
    result = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles).unsqueeze(-2)
    return torch.cat((result.real, result.imag), -1)


def angles_of(rows: int, length: int, half: int) -> Tensor:
    return torch.rand(rows, length, half, dtype=torch.float64) * 100


@pytest.mark.parametrize("shape", [(2, 5, 3, 8), (1, 1, 1, 2), (0, 4, 2, 6), (3, 0, 2, 4)])
def test_pairs_of_channels_are_rotated(shape: tuple[int, int, int, int]) -> None:
    """Every shape, also without rows, is rotated like complex numbers."""
    x, angles = torch.randn(shape), angles_of(shape[0], shape[1], shape[3] // 2)
    actual = rope_eager(x, angles.cos().float(), angles.sin().float())
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), rotate_complex(x, angles), atol=1e-6, rtol=1e-5)


def test_gradients_match_finite_differences() -> None:
    """Gradients, and gradients of gradients, equal finite differences in float64."""
    x, angles = torch.randn(2, 3, 2, 4, dtype=torch.float64, requires_grad=True), angles_of(2, 3, 2)
    assert torch.autograd.gradcheck(lambda x: rope_eager(x, angles.cos(), angles.sin()), (x,))
    assert torch.autograd.gradgradcheck(lambda x: rope_eager(x, angles.cos(), angles.sin()), (x,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """With float32 angles, results and gradients in half precision are exact, rounded once."""
    x, angles = torch.randn(2, 16, 3, 8).to(dtype).requires_grad_(), angles_of(2, 16, 4)
    cos, sin = angles.cos().float(), angles.sin().float()
    actual, exact = rope_eager(x, cos, sin), rotate_complex(x, angles)
    (grad,) = torch.autograd.grad(actual, x, torch.ones_like(actual))
    (exact_grad,) = torch.autograd.grad(exact, x, torch.ones_like(exact))
    assert actual.dtype == grad.dtype == dtype
    eps = torch.finfo(dtype).eps
    assert ((actual.double() - exact).abs() <= exact.abs() * eps * 0.51 + 1e-6).all()
    torch.testing.assert_close(grad.double(), exact_grad.double(), atol=1e-6, rtol=eps)


def test_strided_inputs_give_the_same_result() -> None:
    """A view and a gradient with heads before length give the same results as contiguous copies."""
    x, angles = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True), angles_of(2, 5, 4)
    actual = rope_eager(x.transpose(1, 2), angles.cos(), angles.sin())
    torch.testing.assert_close(actual, rotate_complex(x.transpose(1, 2), angles))
    weights = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    (grad,) = torch.autograd.grad((actual.transpose(1, 2) * weights).sum(), x)
    (expected,) = torch.autograd.grad((rotate_complex(x.transpose(1, 2), angles).transpose(1, 2) * weights).sum(), x)
    torch.testing.assert_close(grad, expected)


def test_interleaved_pairs_are_neighbours() -> None:
    """Interleaved rotation is the same rotation of channels in another order, where neighbours are pairs."""
    x, angles = torch.randn(2, 3, 2, 8, dtype=torch.float64), angles_of(2, 3, 4)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    actual = rope_eager(x, angles.cos(), angles.sin(), interleaved=True)
    torch.testing.assert_close(actual[..., order], rotate_complex(x[..., order], angles))


@pytest.mark.parametrize("interleaved", [False, True])
def test_only_the_first_channels_are_rotated(interleaved: bool) -> None:
    """With angles for fewer channels, the other channels and their gradients are copied bitwise."""
    x, angles = torch.randn(2, 3, 2, 10, requires_grad=True), angles_of(2, 3, 3)
    cos, sin = angles.cos().float(), angles.sin().float()
    actual = rope_eager(x, cos, sin, interleaved)
    assert torch.equal(actual[..., 6:], x[..., 6:])
    torch.testing.assert_close(actual[..., :6], rope_eager(x[..., :6], cos, sin, interleaved))
    (grad,) = torch.autograd.grad(actual, x, torch.ones_like(actual))
    assert (grad[..., 6:] == 1).all()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does
def test_rope_compiles_without_breaks(interleaved: bool) -> None:
    """Traced as one graph, rope rotates the same pairs by the same angles."""
    x, angles = torch.randn(2, 3, 2, 10), angles_of(2, 3, 4)
    cos, sin = angles.cos().float(), angles.sin().float()
    compiled: Any = torch.compile(rope_eager, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, cos, sin, interleaved), rope_eager(x, cos, sin, interleaved))
