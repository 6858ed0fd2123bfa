"""geglu and gpt-oss's clamped swiglu in Triton against the eager implementations in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.kernels.gates.eager import geglu_eager, oss_swiglu_halves_eager
from drawloom.kernels.gates.triton import CLAMPED, GELU_TANH, geglu_triton, oss_swiglu_halves_triton
from support.kernels import DEVICE, assert_all_close, assert_close, draw_tensor, dtypes, exact, few, layouts
from support.seeding import seeds

shapes = st.lists(st.integers(0, 6), max_size=2).flatmap(
    lambda most: st.integers(0, 60).map(lambda last: (*most, last))
)


@few
@given(seeds, shapes, dtypes, layouts, layouts, layouts)
def test_geglu_equals_eager(
    _seed: object, shape: tuple[int, ...], dtype: torch.dtype, of_gate: str, of_up: str, of_grad: str
) -> None:
    """Any shape and strides, also without rows, give result and gradients of float64, rounded."""
    gate, up = draw_tensor(of_gate, *shape, dtype=dtype, scale=3), draw_tensor(of_up, *shape, dtype=dtype)
    grad, wide = draw_tensor(of_grad, *shape, dtype=dtype).detach(), exact(gate, up)
    actual, expected = geglu_triton(gate, up), geglu_eager(*wide)
    assert actual.dtype == dtype
    assert_close(actual, expected, 4)
    grads = torch.autograd.grad(actual, (gate, up), grad)
    assert_all_close(grads, torch.autograd.grad(expected, wide, grad.double()), 8)


@few
@given(seeds, shapes, dtypes, layouts, st.booleans(), st.sampled_from([(1.702, 7.0), (0.9, 0.5)]))
def test_clamped_swiglu_equals_eager(
    _seed: object, shape: tuple[int, ...], dtype: torch.dtype, layout: str, scaled: bool, bounds: tuple[float, float]
) -> None:
    """Results and gradients, also where bounds cut them off, and with a scale per vector."""
    both = draw_tensor(layout, *shape[:-1], 2 * shape[-1], dtype=dtype, scale=2)
    scale = draw_tensor("contiguous", *shape[:-1]) if scaled else None
    inputs = (both,) if scale is None else (both, scale)
    wide = exact(*inputs)
    actual = oss_swiglu_halves_triton(both, scale, *bounds)
    expected = oss_swiglu_halves_eager(wide[0], wide[1] if scaled else None, *bounds)
    assert_close(actual, expected, 4)
    # With the results' signs, the terms of a scale's gradient do not cancel one another.
    grad = draw_tensor("contiguous", *shape, dtype=dtype).detach().copysign(actual.detach())
    grads = torch.autograd.grad(actual, inputs, grad)
    assert_all_close(grads, torch.autograd.grad(expected, wide, grad.double()), 8)


def test_rows_wider_than_a_program_are_complete() -> None:
    """Rows with several tiles, the last one incomplete, are computed completely, also gradients of their scales."""
    both, scale = draw_tensor("sliced", 3, 10_000, scale=5), draw_tensor("contiguous", 3)
    wide = exact(both, scale)
    for actual, expected, inputs, wide_inputs in (
        (geglu_triton(*both.chunk(2, -1)), geglu_eager(*wide[0].chunk(2, -1)), (both,), wide[:1]),
        (
            oss_swiglu_halves_triton(both, scale, 1.7, 7.0),
            oss_swiglu_halves_eager(wide[0], wide[1], 1.7, 7.0),
            (both, scale),
            wide,
        ),
    ):
        assert_close(actual, expected, 4)
        grads = torch.autograd.grad(actual.sum(), inputs)
        assert_all_close(grads, torch.autograd.grad(expected.sum(), wide_inputs), 4)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy, in the interpreter
def test_gates_of_any_size_give_finite_results_and_nan_stays() -> None:
    """Large gates give finite results and gradients, and a NaN is not hidden by a bound."""
    gate = torch.tensor([-1e30, -200.0, -89.0, -20.0, 0.0, 20.0, 89.0, 200.0, 1e30], device=DEVICE)
    both = torch.cat([gate, torch.ones_like(gate)]).requires_grad_()
    results = geglu_triton(*both.chunk(2)), oss_swiglu_halves_triton(both, None, 1.702, 7.0)
    for result in results:
        (grad,) = torch.autograd.grad(result.sum(), both)
        assert result.isfinite().all() and grad.isfinite().all()
    torch.testing.assert_close(results[0][5:], gate[5:])
    nan = torch.full((2,), torch.nan, device=DEVICE)
    assert geglu_triton(nan, nan.nan_to_num(1.0)).isnan().all()
    for halves in ((nan, torch.ones_like(nan)), (torch.ones_like(nan), nan)):
        assert oss_swiglu_halves_triton(torch.cat(halves), None, 1.702, 7.0).isnan().all()


def test_operators_pass_opcheck() -> None:
    """Both directions pass torch.library.opcheck, which torch.compile relies on."""
    x, both, scale = (torch.randn(*shape, device=DEVICE) for shape in ((3, 8), (3, 16), (3,)))
    operators = torch.ops.drawloom
    torch.library.opcheck(operators.gate.default, (x, x + 1, None, GELU_TANH))
    torch.library.opcheck(operators.gate_backward.default, (x, x, x + 1, None, GELU_TANH))
    torch.library.opcheck(operators.gate.default, (*both.chunk(2, -1), scale, CLAMPED, 1.7, 7.0))
    torch.library.opcheck(operators.gate_halves_backward.default, (x, both, None, CLAMPED, 1.7, 7.0))
