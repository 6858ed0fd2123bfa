"""Grouped GEMM, eager and by torch's grouped_mm, against products of single rows."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from drawloom.kernels.deferral import Deferral
from drawloom.kernels.grouped_gemm.eager import grouped_gemm_eager, grouped_gemm_torch

Gemm = Callable[..., Tensor]
both = pytest.mark.parametrize("gemm", [grouped_gemm_eager, grouped_gemm_torch])

ENDS = [0, 4, 4, 9, 10]
"""Ends of the experts' rows: some experts have no rows, and two of twelve rows are unused."""


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x, weight = torch.randn(12, 6, dtype=dtype), torch.randn(5, 6, 7, dtype=dtype)
    return x.requires_grad_(), weight.requires_grad_(), torch.tensor(ENDS, dtype=torch.int32)


def multiply_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Return the used rows, computed one at a time."""
    owners = [next(expert for expert, end in enumerate(ENDS) if row < end) for row in range(ENDS[-1])]
    return torch.stack([x[row] @ weight[owner] for row, owner in enumerate(owners)])


@both
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_are_multiplied_by_their_experts_matrix(gemm: Gemm, transposed: bool) -> None:
    """Rows and both gradients equal products of single rows, with the matrices transposed or not."""
    x, weight, ends = case()
    matrices = weight.detach().transpose(1, 2).contiguous().requires_grad_() if transposed else weight
    actual, exact = gemm(x, matrices, ends, transposed), multiply_rows(x, weight)
    assert actual.shape == (12, 7)
    torch.testing.assert_close(actual[:10], exact)
    grad = torch.randn(10, 7)
    grad_x, grad_weight = torch.autograd.grad(actual[:10], (x, matrices), grad)
    exact_grads = torch.autograd.grad(exact, (x, weight), grad)
    torch.testing.assert_close(grad_x[:10], exact_grads[0][:10])
    torch.testing.assert_close(grad_weight.transpose(1, 2) if transposed else grad_weight, exact_grads[1])


def test_gradients_match_finite_differences() -> None:
    """Gradients equal finite differences in float64."""
    x, weight, ends = case(torch.float64)
    assert torch.autograd.gradcheck(lambda x, weight: grouped_gemm_eager(x, weight, ends), (x, weight))


@both
def test_nan_in_unused_rows_does_not_spread(gemm: Gemm) -> None:
    """NaN in unused rows of input and gradient reaches neither used rows nor matrix gradients."""
    x, weight, ends = case()
    with torch.no_grad():
        x[10:] = torch.nan
    actual = gemm(x, weight, ends)
    grad = torch.randn(12, 7)
    grad[10:] = torch.nan
    grad_x, grad_weight = torch.autograd.grad(actual, (x, weight), grad)
    assert actual[:10].isfinite().all() and grad_x[:10].isfinite().all() and grad_weight.isfinite().all()
    assert not grad_weight[[0, 2]].any()


@both
def test_a_frozen_input_leaves_the_other_gradient_unchanged(gemm: Gemm) -> None:
    """With one input frozen, the other's gradient is the same."""
    x, weight, ends = case()
    grad_x, grad_weight = torch.autograd.grad(gemm(x, weight, ends)[:10].sum(), (x, weight))
    (alone,) = torch.autograd.grad(gemm(x, weight.detach(), ends)[:10].sum(), x)
    assert torch.equal(alone[:10], grad_x[:10])
    (alone,) = torch.autograd.grad(gemm(x.detach(), weight, ends)[:10].sum(), weight)
    assert torch.equal(alone, grad_weight)


@both
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_gradient_can_be_deferred(gemm: Gemm, transposed: bool) -> None:
    """A deferred gradient of the matrices is bitwise equal to an immediate one."""
    x, weight, ends = case()
    weight = weight.detach().transpose(1, 2).contiguous().requires_grad_() if transposed else weight
    used = torch.autograd.grad(gemm(x, weight, ends, transposed)[:10].sum(), (x, weight))
    deferral = Deferral()
    with deferral:
        result = gemm(x, weight, ends, transposed)[:10]
    with deferral.defer():
        actual = torch.autograd.grad(result.sum(), (x, weight), allow_unused=True)
    assert actual[1] is None
    assert torch.equal(actual[0][:10], used[0][:10])
    assert torch.equal(deferral.take_queued_gradients()[0].drain_and_return_remaining_grad(), used[1])


@both
def test_without_rows_gradients_are_zero(gemm: Gemm) -> None:
    """Without rows the gradient of every matrix is zero."""
    _, weight, ends = case()
    x = torch.empty(0, 6, requires_grad=True)
    actual = gemm(x, weight, ends * 0)
    grads = torch.autograd.grad(actual.sum(), (x, weight))
    assert actual.shape == (0, 7) and grads[0].shape == (0, 6) and not grads[1].any()
