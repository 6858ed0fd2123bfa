"""Expert biases against a loop over experts, in float64."""

import pytest
import torch
from torch import Tensor

from drawloom.kernels.deferral import Deferral
from drawloom.kernels.grouped_gemm.eager import add_expert_bias_eager

ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)
"""Experts with 2, 0 and 3 rows; the sixth row is unused."""


def draw() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(6, 4).requires_grad_(), torch.randn(3, 4).requires_grad_(), torch.rand(6).requires_grad_()


@pytest.mark.usefixtures("float64")
def test_every_row_gets_its_experts_bias() -> None:
    """Rows equal a loop over experts, with and without a scale; gradients equal numerical ones."""
    rows, bias, scale = draw()
    for factors in (None, scale):
        expected = rows.detach().clone()
        for expert, (first, last) in enumerate(((0, 2), (2, 2), (2, 5))):
            for row in range(first, last):
                expected[row] += bias[expert].detach() * (1.0 if factors is None else factors[row].item())
        torch.testing.assert_close(add_expert_bias_eager(rows, bias, ENDS, factors), expected)
    assert torch.autograd.gradcheck(lambda x, b, s: add_expert_bias_eager(x, b, ENDS, s), (rows, bias, scale))


@pytest.mark.usefixtures("float64")
def test_unused_rows_reach_no_gradient_of_a_bias() -> None:
    """NaN in unused rows and their gradients leaves bias and scale gradients finite."""
    rows, bias, scale = draw()
    grad = torch.ones(6, 4)
    grad[5] = torch.nan
    with torch.no_grad():
        rows[5] = scale[5] = torch.nan
    result = add_expert_bias_eager(rows, bias, ENDS, scale)
    _, grad_bias, grad_scale = torch.autograd.grad(result, (rows, bias, scale), grad)
    torch.testing.assert_close(grad_bias[2], scale[2:5].sum().expand(4))
    assert not grad_bias[1].any()
    torch.testing.assert_close(grad_scale[:5], bias[[0, 0, 2, 2, 2]].sum(1))
    assert grad_scale[5] == 0


@pytest.mark.usefixtures("float64")
def test_a_split_backward_pass_defers_the_bias_gradient() -> None:
    """The deferred gradient is bitwise the immediate one."""
    rows, bias, scale = draw()
    (expected,) = torch.autograd.grad(add_expert_bias_eager(rows, bias, ENDS, scale).square().sum(), bias)
    deferral = Deferral()
    with deferral:
        result = add_expert_bias_eager(rows, bias, ENDS, scale)
    with deferral.defer():
        result.square().sum().backward()  # type: ignore[no-untyped-call]
    assert bias.grad is None
    (deferred,) = deferral.take_queued_gradients()
    computed = deferred.drain_and_return_remaining_grad()
    assert computed is not None and torch.equal(computed, expected)
