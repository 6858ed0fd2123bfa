"""rope against the rotation of complex numbers."""

from typing import Any

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
def test_rotates_pairs_of_channels(shape: tuple[int, int, int, int]) -> None:
    """Every shape, zero rows included, is rotated as complex numbers are."""
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


def test_interleaved_pairs() -> None:
    """Interleaved, neighbours are pairs: the same rotation of channels in another order."""
    x, angles = torch.randn(2, 3, 2, 8, dtype=torch.float64), angles_of(2, 3, 4)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    found = rope_eager(x, angles.cos(), angles.sin(), interleaved=True)
    torch.testing.assert_close(found[..., order], turned(x[..., order], angles))


@pytest.mark.parametrize("interleaved", [False, True])
def test_only_the_first_channels_are_rotated(interleaved: bool) -> None:
    """With angles for fewer channels, the others stay bitwise, and get their gradient bitwise."""
    x, angles = torch.randn(2, 3, 2, 10, requires_grad=True), angles_of(2, 3, 3)
    cos, sin = angles.cos().float(), angles.sin().float()
    found = rope_eager(x, cos, sin, interleaved)
    assert torch.equal(found[..., 6:], x[..., 6:])
    torch.testing.assert_close(found[..., :6], rope_eager(x[..., :6], cos, sin, interleaved))
    (grad,) = torch.autograd.grad(found, x, torch.ones_like(found))
    assert (grad[..., 6:] == 1).all()


def test_in_place() -> None:
    """In place, the tensor itself changes, gradients are the same, and changing a saved tensor is an error."""
    x, angles = torch.randn(2, 3, 2, 8, requires_grad=True), angles_of(2, 3, 4)
    cos, sin = angles.cos().float(), angles.sin().float()
    held = x * 1
    found, expected = rope_eager(held, cos, sin, in_place=True), rope_eager(x, cos, sin)
    assert found is held
    assert torch.equal(found, expected)
    grads = [torch.autograd.grad(result.square().sum(), x)[0] for result in (found, expected)]
    torch.testing.assert_close(*grads)
    needed = x.exp()
    rope_eager(needed, cos, sin, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(needed.sum(), x)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does
def test_compiles_without_breaks(interleaved: bool) -> None:
    """Traced as one graph, it rotates the same pairs by the same angles."""
    x, angles = torch.randn(2, 3, 2, 10), angles_of(2, 3, 4)
    cos, sin = angles.cos().float(), angles.sin().float()
    compiled: Any = torch.compile(rope_eager, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, cos, sin, interleaved), rope_eager(x, cos, sin, interleaved))
