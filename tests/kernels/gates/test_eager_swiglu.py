"""swiglu against its formula, and its gradients against finite differences."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.gates.eager import swiglu_eager, swiglu_halves_eager


def formula(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.double(), up.double()
    return gate / (1 + (-gate).exp()) * up


@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 0, 4)])
def test_swiglu_equals_its_formula(shape: tuple[int, ...]) -> None:
    """Every shape, also without rows, gives silu(gate) * up."""
    gate, up = torch.randn(shape) * 4, torch.randn(shape)
    torch.testing.assert_close(swiglu_eager(gate, up).double(), formula(gate, up), atol=1e-6, rtol=1e-5)


def test_gradients_match_finite_differences() -> None:
    """Both gradients equal finite differences in float64."""
    gate, up = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(swiglu_eager, (gate, up))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Results and gradients in half precision are exact, rounded once."""
    gate, up = (torch.randn(1000).to(dtype).requires_grad_() for _ in range(2))
    grad = torch.randn(1000).to(dtype)
    actual, exact = swiglu_eager(gate, up), formula(gate, up)
    grads = torch.autograd.grad(actual, (gate, up), grad)
    exact_grads = torch.autograd.grad(exact, (gate, up), grad.double())
    for result, reference in zip((actual, *grads), (exact, *exact_grads), strict=True):
        assert result.dtype == dtype
        assert (
            (result.double() - reference.double()).abs() <= reference.abs() * torch.finfo(dtype).eps * 0.51 + 1e-6
        ).all()


def test_strided_inputs_give_the_same_result() -> None:
    """Transposed halves of one tensor give the same results and gradients as copies."""
    both = torch.randn(6, 5, 8, requires_grad=True)
    gate, up = (half.transpose(0, 1) for half in both.chunk(2, -1))
    actual = swiglu_eager(gate, up)
    torch.testing.assert_close(actual, swiglu_eager(gate.contiguous(), up.contiguous()))
    (grad,) = torch.autograd.grad(actual.sum(), both)
    (expected,) = torch.autograd.grad(formula(gate, up).sum(), both)
    torch.testing.assert_close(grad, expected, atol=1e-5, rtol=1e-5)


def test_a_scale_multiplies_vectors() -> None:
    """A factor for each vector multiplies the result, and its gradient equals finite differences."""
    gate, up, scale = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (2, 3), (2,)))
    torch.testing.assert_close(swiglu_eager(gate, up, scale), formula(gate, up) * scale[:, None])
    assert torch.autograd.gradcheck(swiglu_eager, (gate, up, scale))


def test_halves_of_one_tensor_equal_two_tensors() -> None:
    """Two halves of one tensor give the same result as two tensors."""
    both = torch.randn(4, 6, requires_grad=True)
    torch.testing.assert_close(swiglu_halves_eager(both), swiglu_eager(both[:, :3], both[:, 3:]))
