"""rms_norm in Triton against the eager implementation in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.kernels.rms_norm.eager import add_rms_norm_eager, rms_norm_eager
from drawloom.kernels.rms_norm.triton import add_rms_norm_triton, rms_norm_triton
from support.kernels import DEVICE, assert_all_close, assert_close, draw_tensor, dtypes, exact, few, layouts
from support.seeding import seeds

shapes = st.lists(st.integers(0, 9), max_size=2).flatmap(
    lambda most: st.integers(1, 70).map(lambda width: (*most, width))
)


@few
@given(seeds, shapes, dtypes, dtypes, layouts, layouts, st.booleans())
def test_triton_equals_eager(
    _seed: object,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    of_weight: torch.dtype,
    layout: str,
    of_grad: str,
    zero_centered: bool,
) -> None:
    """Any shape, strides and dtypes, also without rows, give result and gradients of float64, rounded."""
    x, weight = draw_tensor(layout, *shape, dtype=dtype), draw_tensor("contiguous", shape[-1], dtype=of_weight)
    grad = draw_tensor(of_grad, *shape, dtype=dtype).detach()
    actual = rms_norm_triton(x, weight, 0.1, zero_centered)
    wide = exact(x, weight)
    expected = rms_norm_eager(wide[0], wide[1], 0.1, zero_centered)
    assert actual.dtype == dtype
    assert_close(actual, expected, 4)
    grads = torch.autograd.grad(actual, (x, weight), grad)
    assert [g.dtype for g in grads] == [dtype, of_weight]
    assert_all_close(grads, torch.autograd.grad(expected, wide, grad.double()), 8)


@few
@given(seeds, shapes, dtypes, layouts, layouts)
def test_fused_sum_equals_the_sum(
    _seed: object, shape: tuple[int, ...], dtype: torch.dtype, layout: str, of_residual: str
) -> None:
    """The fused sum and its norm are bitwise equal to separate ones, and gradients agree with float64."""
    x, residual = draw_tensor(layout, *shape, dtype=dtype), draw_tensor(of_residual, *shape, dtype=dtype)
    weight, grads = (
        draw_tensor("contiguous", shape[-1]),
        [draw_tensor("contiguous", *shape, dtype=dtype).detach() for _ in "ab"],
    )
    normed, summed = add_rms_norm_triton(x, residual, weight, 0.1)
    assert torch.equal(summed, x + residual)
    assert torch.equal(normed, rms_norm_triton(summed, weight, 0.1))
    grad_x, of_residual_, of_weight = torch.autograd.grad((normed, summed), (x, residual, weight), grads)
    wide = exact(x, residual, weight)
    wide[0].data = summed.detach().double() - wide[1].data  # the sum is rounded
    expected = torch.autograd.grad(
        add_rms_norm_eager(wide[0], wide[1], wide[2], 0.1), wide, [grad.double() for grad in grads]
    )
    assert torch.equal(grad_x, of_residual_)
    assert_all_close((grad_x, of_weight), (expected[0], expected[2]), 8)


def test_programs_process_many_rows() -> None:
    """More rows than programs process at once, wide or narrow, give the same results as few rows."""
    for rows, width in ((300, 8), (37, 700)):
        x, weight = draw_tensor("contiguous", rows, width), draw_tensor("contiguous", width)
        wide = exact(x, weight)
        actual, expected = rms_norm_triton(x, weight, 1e-6), rms_norm_eager(wide[0], wide[1], 1e-6)
        assert_close(actual, expected, 4)
        grads = torch.autograd.grad(actual.sum(), (x, weight))
        assert_all_close(grads, torch.autograd.grad(expected.sum(), wide), 8)


def test_a_frozen_weight_leaves_the_other_gradient_unchanged() -> None:
    """A frozen weight gets no gradient, and the gradient of x does not change."""
    x, weight = draw_tensor("contiguous", 5, 12), draw_tensor("contiguous", 12)
    (both, _) = torch.autograd.grad(rms_norm_triton(x, weight, 1e-6).sum(), (x, weight))
    (alone,) = torch.autograd.grad(rms_norm_triton(x, weight.detach(), 1e-6).sum(), (x,))
    assert torch.equal(both, alone)


def test_gradients_are_deterministic() -> None:
    """Gradients are bitwise the same in a second run."""
    x, weight = draw_tensor("contiguous", 50, 33, dtype=torch.bfloat16), draw_tensor("contiguous", 33)
    runs = [torch.autograd.grad(rms_norm_triton(x, weight, 1e-6).float().sum(), (x, weight)) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_float64_is_refused() -> None:
    """A dtype that the kernel would round is an error that names the implementation to use instead."""
    with pytest.raises(TypeError, match="float64; use the eager implementation"):
        rms_norm_triton(torch.ones(2, 2, dtype=torch.float64, device=DEVICE), torch.ones(2, device=DEVICE), 1e-6)


def test_operators_pass_opcheck() -> None:
    """Both directions pass torch.library.opcheck, which torch.compile relies on."""
    x, weight = torch.randn(3, 8, device=DEVICE), torch.randn(8, device=DEVICE)
    rstd = torch.rand(3, device=DEVICE)
    torch.library.opcheck(torch.ops.drawloom.rms_norm.default, (x, None, weight, 1e-6, False))
    torch.library.opcheck(torch.ops.drawloom.rms_norm.default, (x, x + 1, weight, 1e-6, True))
    torch.library.opcheck(torch.ops.drawloom.rms_norm_backward.default, (x, None, x, weight, rstd, False, True))


@pytest.mark.parametrize("used", [0, 1])
def test_either_result_alone_has_its_gradient(used: int) -> None:
    """The norm or the sum alone has its gradients, as if the other had zeros."""
    x, residual = (torch.randn(5, 32, device=DEVICE, requires_grad=True) for _ in range(2))
    weight = torch.randn(32, device=DEVICE, requires_grad=True)
    for function in (add_rms_norm_triton, add_rms_norm_eager):
        result = function(x, residual, weight, 1e-6)[used]
        grads = torch.autograd.grad(
            result.square().sum(), [x, residual, weight], allow_unused=True, materialize_grads=True
        )
        if function is add_rms_norm_triton:
            actual = grads
    assert_all_close(actual, grads, 8)
