"""rms_norm against its formula, and its gradients against finite differences."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.rms_norm import add_rms_norm_eager, rms_norm_eager


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 4, 6), (1, 1), (0, 8), (2, 0, 8)])
def test_equals_formula(shape: tuple[int, ...]) -> None:
    """Every shape, zero rows included, gives x / rms(x) * weight."""
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    found = rms_norm_eager(x, weight, 1e-3)
    assert found.shape == x.shape
    torch.testing.assert_close(found.double(), formula(x, weight, 1e-3), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(4,), (3, 5), (2, 2, 3), (0, 3)])
def test_gradients(shape: tuple[int, ...]) -> None:
    """Gradients of x and weight are those of finite differences in float64."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm_eager(x, weight, 1e-3), (x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_half_precision_once(dtype: torch.dtype) -> None:
    """Half precision gives the exact result, rounded once, also where squares would leave float16's range."""
    x, weight = (torch.randn(64, 96) * 500).to(dtype), torch.randn(96).to(dtype)
    exact = formula(x, weight, 1e-6)
    found = rms_norm_eager(x, weight, 1e-6)
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps * 0.51 + 1e-7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_keep_their_dtype(dtype: torch.dtype) -> None:
    """Gradients come in the dtypes of x and weight, which may differ, and are those of float64 to rounding."""
    x = torch.randn(32, 16).to(dtype).requires_grad_()
    weight = torch.randn(16, requires_grad=True)
    grad = torch.randn(32, 16).to(dtype)
    found = torch.autograd.grad(rms_norm_eager(x, weight, 1e-6), (x, weight), grad)
    exact = torch.autograd.grad(formula(x, weight, 1e-6), (x, weight), grad.double())
    assert [g.dtype for g in found] == [dtype, torch.float32]
    torch.testing.assert_close(found, exact, atol=0.02, rtol=0.01)


def test_strided_input() -> None:
    """A transposed, sliced view and an expanded gradient give what their copies give."""
    x = torch.randn(6, 4, 10, requires_grad=True)
    view, weight = x.transpose(0, 1)[:, ::2], torch.randn(10, requires_grad=True)
    found = rms_norm_eager(view, weight, 1e-6)
    torch.testing.assert_close(found, rms_norm_eager(view.contiguous(), weight, 1e-6))
    grads = torch.autograd.grad(found.sum(), (x, weight))
    expected = torch.autograd.grad(formula(view, weight, 1e-6).sum(), (x, weight))
    torch.testing.assert_close(grads, expected, atol=1e-5, rtol=1e-5)


def test_zero_centred_weight() -> None:
    """A zero-centered weight is 1 less than the factor, and has the same gradient."""
    x, weight = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64, requires_grad=True)
    centred = (weight - 1).detach().requires_grad_()
    found, expected = rms_norm_eager(x, centred, 1e-3, zero_centered=True), rms_norm_eager(x, weight, 1e-3)
    torch.testing.assert_close(found, expected)
    grads = torch.autograd.grad(found.sum(), centred), torch.autograd.grad(expected.sum(), weight)
    torch.testing.assert_close(*grads)


def test_add_rms_norm_normalizes_the_rounded_sum() -> None:
    """The sum is rounded as by itself, and its norm is that of the rounded sum; both summands get gradients."""
    x, residual = (torch.randn(7, 16, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(16)
    normed, summed = add_rms_norm_eager(x, residual, weight, 1e-3)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, rms_norm_eager(summed, weight, 1e-3))
    wide = [t.double().requires_grad_() for t in (x, residual, weight)]
    assert torch.autograd.gradcheck(lambda x, residual, weight: add_rms_norm_eager(x, residual, weight, 0.1), wide)


def test_frozen_weight() -> None:
    """A frozen weight gets no gradient, and the input's stays what it was."""
    x, weight, grad = torch.randn(5, 8, requires_grad=True), torch.randn(8), torch.randn(5, 8)
    (found,) = torch.autograd.grad(rms_norm_eager(x, weight, 1e-3), x, grad)
    learned = weight.clone().requires_grad_()
    assert torch.equal(found, torch.autograd.grad(rms_norm_eager(x, learned, 1e-3), (x, learned), grad)[0])
