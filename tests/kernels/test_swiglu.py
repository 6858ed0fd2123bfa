"""swiglu against its formula, and its gradients against finite differences."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.swiglu import swiglu_eager, swiglu_halves_eager


def formula(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.double(), up.double()
    return gate / (1 + (-gate).exp()) * up


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 0, 4)])
def test_equals_formula(shape: tuple[int, ...]) -> None:
    """Every shape, zero rows included, gives silu(gate) * up."""
    gate, up = torch.randn(shape) * 4, torch.randn(shape)
    torch.testing.assert_close(swiglu_eager(gate, up).double(), formula(gate, up), atol=1e-6, rtol=1e-5)


def test_gradients() -> None:
    """Gradients of gate and up are those of finite differences in float64."""
    gate, up = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(swiglu_eager, (gate, up))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_half_precision_once(dtype: torch.dtype) -> None:
    """Half precision gives the exact result, and exact gradients, each rounded once."""
    gate, up = (torch.randn(1000).to(dtype).requires_grad_() for _ in range(2))
    grad = torch.randn(1000).to(dtype)
    found, exact = swiglu_eager(gate, up), formula(gate, up)
    grads = torch.autograd.grad(found, (gate, up), grad)
    exact_grads = torch.autograd.grad(exact, (gate, up), grad.double())
    for ours, theirs in zip((found, *grads), (exact, *exact_grads), strict=True):
        assert ours.dtype == dtype
        assert ((ours.double() - theirs.double()).abs() <= theirs.abs() * torch.finfo(dtype).eps * 0.51 + 1e-6).all()


def test_strided_input() -> None:
    """Halves of one tensor, transposed, give what their copies give, backwards too."""
    both = torch.randn(6, 5, 8, requires_grad=True)
    gate, up = (half.transpose(0, 1) for half in both.chunk(2, -1))
    found = swiglu_eager(gate, up)
    torch.testing.assert_close(found, swiglu_eager(gate.contiguous(), up.contiguous()))
    (grad,) = torch.autograd.grad(found.sum(), both)
    (expected,) = torch.autograd.grad(formula(gate, up).sum(), both)
    torch.testing.assert_close(grad, expected, atol=1e-5, rtol=1e-5)


def test_scales_vectors() -> None:
    """A factor for each vector is in the result, and gets the gradient of finite differences."""
    gate, up, scale = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (2, 3), (2,)))
    torch.testing.assert_close(swiglu_eager(gate, up, scale), formula(gate, up) * scale[:, None])
    assert torch.autograd.gradcheck(swiglu_eager, (gate, up, scale))


def test_halves_of_one_tensor() -> None:
    """The halves of one tensor give the same as two tensors."""
    both = torch.randn(4, 6, requires_grad=True)
    torch.testing.assert_close(swiglu_halves_eager(both), swiglu_eager(both[:, :3], both[:, 3:]))
