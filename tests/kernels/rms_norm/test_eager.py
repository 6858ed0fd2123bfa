"""rms_norm against its formula, and its gradients against finite differences."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.rms_norm.eager import add_rms_norm_eager, rms_norm_eager


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 3, 4, 6), (1, 1), (0, 8), (2, 0, 8)])
def test_rms_norm_equals_its_formula(shape: tuple[int, ...]) -> None:
    """Every shape, also without rows, gives x / rms(x) * weight."""
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    actual = rms_norm_eager(x, weight, 1e-3)
    assert actual.shape == x.shape
    torch.testing.assert_close(actual.double(), formula(x, weight, 1e-3), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(4,), (3, 5), (2, 2, 3), (0, 3)])
def test_gradients_match_finite_differences(shape: tuple[int, ...]) -> None:
    """Both gradients equal finite differences in float64."""
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm_eager(x, weight, 1e-3), (x, weight))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Half precision gives the exact result, rounded once, also if squares exceed float16's range."""
    x, weight = (torch.randn(64, 96) * 500).to(dtype), torch.randn(96).to(dtype)
    exact = formula(x, weight, 1e-6)
    actual = rms_norm_eager(x, weight, 1e-6)
    assert actual.dtype == dtype
    assert ((actual.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps * 0.51 + 1e-7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_keep_their_dtype(dtype: torch.dtype) -> None:
    """Gradients have the dtypes of x and weight, which may differ, and agree with float64 up to rounding."""
    x = torch.randn(32, 16).to(dtype).requires_grad_()
    weight = torch.randn(16, requires_grad=True)
    grad = torch.randn(32, 16).to(dtype)
    actual = torch.autograd.grad(rms_norm_eager(x, weight, 1e-6), (x, weight), grad)
    exact = torch.autograd.grad(formula(x, weight, 1e-6), (x, weight), grad.double())
    assert [g.dtype for g in actual] == [dtype, torch.float32]
    torch.testing.assert_close(actual, exact, atol=0.02, rtol=0.01)


def test_strided_inputs_give_the_same_result() -> None:
    """A transposed, sliced view and an expanded gradient give the same results as contiguous copies."""
    x = torch.randn(6, 4, 10, requires_grad=True)
    view, weight = x.transpose(0, 1)[:, ::2], torch.randn(10, requires_grad=True)
    actual = rms_norm_eager(view, weight, 1e-6)
    torch.testing.assert_close(actual, rms_norm_eager(view.contiguous(), weight, 1e-6))
    grads = torch.autograd.grad(actual.sum(), (x, weight))
    expected = torch.autograd.grad(formula(view, weight, 1e-6).sum(), (x, weight))
    torch.testing.assert_close(grads, expected, atol=1e-5, rtol=1e-5)


def test_a_zero_centered_weight_is_the_factor_less_1() -> None:
    """A zero-centered weight is 1 less than the factor, and has the same gradient."""
    x, weight = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64, requires_grad=True)
    centred = (weight - 1).detach().requires_grad_()
    actual, expected = rms_norm_eager(x, centred, 1e-3, zero_centered=True), rms_norm_eager(x, weight, 1e-3)
    torch.testing.assert_close(actual, expected)
    grads = torch.autograd.grad(actual.sum(), centred), torch.autograd.grad(expected.sum(), weight)
    torch.testing.assert_close(*grads)


def test_add_rms_norm_normalizes_the_rounded_sum() -> None:
    """The sum is rounded before it is normalized, and both summands get gradients."""
    x, residual = (torch.randn(7, 16, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(16)
    normed, summed = add_rms_norm_eager(x, residual, weight, 1e-3)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, rms_norm_eager(summed, weight, 1e-3))
    wide = [t.double().requires_grad_() for t in (x, residual, weight)]
    assert torch.autograd.gradcheck(lambda x, residual, weight: add_rms_norm_eager(x, residual, weight, 0.1), wide)


def test_a_frozen_weight_gets_no_gradient() -> None:
    """A frozen weight gets no gradient, and the input's gradient does not change."""
    x, weight, grad = torch.randn(5, 8, requires_grad=True), torch.randn(8), torch.randn(5, 8)
    (actual,) = torch.autograd.grad(rms_norm_eager(x, weight, 1e-3), x, grad)
    learned = weight.clone().requires_grad_()
    assert torch.equal(actual, torch.autograd.grad(rms_norm_eager(x, learned, 1e-3), (x, learned), grad)[0])
