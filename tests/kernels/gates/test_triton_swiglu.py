"""swiglu in Triton against the eager implementation in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.kernels.gates.eager import swiglu_eager, swiglu_halves_eager
from drawloom.kernels.gates.triton import SILU, swiglu_halves_triton, swiglu_triton
from support.kernels import DEVICE, assert_all_close, assert_close, draw_tensor, dtypes, exact, few, layouts
from support.seeding import seeds

shapes = st.lists(st.integers(0, 6), max_size=2).flatmap(
    lambda most: st.integers(0, 60).map(lambda last: (*most, last))
)


@few
@given(seeds, shapes, dtypes, layouts, layouts, layouts)
def test_triton_equals_eager(
    _seed: object, shape: tuple[int, ...], dtype: torch.dtype, of_gate: str, of_up: str, of_grad: str
) -> None:
    """Any shape and strides, also without rows, give result and gradients of float64, rounded."""
    gate, up = draw_tensor(of_gate, *shape, dtype=dtype, scale=3), draw_tensor(of_up, *shape, dtype=dtype)
    grad, wide = draw_tensor(of_grad, *shape, dtype=dtype).detach(), exact(gate, up)
    actual, expected = swiglu_triton(gate, up), swiglu_eager(*wide)
    assert actual.dtype == dtype
    assert_close(actual, expected, 4)
    grads = torch.autograd.grad(actual, (gate, up), grad)
    assert_all_close(grads, torch.autograd.grad(expected, wide, grad.double()), 8)


@few
@given(seeds, shapes, dtypes, dtypes, layouts)
def test_a_scale_multiplies_vectors(
    _seed: object, shape: tuple[int, ...], dtype: torch.dtype, of_scale: torch.dtype, layout: str
) -> None:
    """A scale for each vector multiplies the result and the gradients, and gets a gradient."""
    gate, up = draw_tensor(layout, *shape, dtype=dtype), draw_tensor("contiguous", *shape, dtype=dtype)
    scale, grad = (
        draw_tensor("contiguous", *shape[:-1], dtype=of_scale),
        draw_tensor("contiguous", *shape, dtype=dtype).detach(),
    )
    wide = exact(gate, up, scale)
    actual, expected = swiglu_triton(gate, up, scale), swiglu_eager(*wide)
    assert_close(actual, expected, 4)
    grads = torch.autograd.grad(actual, (gate, up, scale), grad)
    assert grads[2].dtype == of_scale
    assert_all_close(grads, torch.autograd.grad(expected, wide, grad.double()), 8)


@few
@given(seeds, shapes, dtypes, layouts, st.booleans())
def test_halves_of_one_tensor_equal_two_tensors(
    _seed: object, shape: tuple[int, ...], dtype: torch.dtype, layout: str, scaled: bool
) -> None:
    """Two halves of one tensor give the same result as two tensors."""
    both = draw_tensor(layout, *shape[:-1], 2 * shape[-1], dtype=dtype)
    inputs = (both, draw_tensor("contiguous", *shape[:-1])) if scaled else (both,)
    wide = exact(*inputs)
    actual, expected = swiglu_halves_triton(*inputs), swiglu_halves_eager(*wide)
    assert_close(actual, expected, 4)
    grad = draw_tensor("contiguous", *shape, dtype=dtype).detach()
    grads = torch.autograd.grad(actual, inputs, grad)
    assert_all_close(grads, torch.autograd.grad(expected, wide, grad.double()), 8)


def test_rows_wider_than_a_program_are_complete() -> None:
    """
    Rows with several tiles, the last one incomplete, are computed completely, and so are gradients of their scales.
    """
    gate, up, scale = draw_tensor("sliced", 3, 5000), draw_tensor("contiguous", 3, 5000), draw_tensor("contiguous", 3)
    wide = exact(gate, up, scale)
    for inputs, wide_inputs in (((gate, up), wide[:2]), ((gate, up, scale), wide)):
        actual, expected = swiglu_triton(*inputs), swiglu_eager(*wide_inputs)
        assert_close(actual, expected, 4)
        grads = torch.autograd.grad(actual.sum(), inputs)
        assert_all_close(grads, torch.autograd.grad(expected.sum(), wide_inputs), 4)


@pytest.mark.filterwarnings("ignore:overflow encountered")  # numpy, in the interpreter
def test_gates_of_any_size_give_finite_results() -> None:
    """Gates of any size give finite results and gradients."""
    gate = torch.tensor([-1e30, -200.0, -89.0, 0.0, 89.0, 200.0, 1e30], device=DEVICE, requires_grad=True)
    up = torch.ones_like(gate, requires_grad=True)
    actual = swiglu_triton(gate, up)
    grads = torch.autograd.grad(actual.sum(), (gate, up))
    assert all(x.isfinite().all() for x in (actual, *grads))


def test_operators_pass_opcheck() -> None:
    """Both directions pass torch.library.opcheck, which torch.compile relies on."""
    x, both, scale = (torch.randn(*shape, device=DEVICE) for shape in ((3, 8), (3, 16), (3,)))
    torch.library.opcheck(torch.ops.drawloom.gate.default, (x, x + 1, None, SILU))
    torch.library.opcheck(torch.ops.drawloom.gate.default, (x, x + 1, scale, SILU))
    torch.library.opcheck(torch.ops.drawloom.gate_backward.default, (x, x, x + 1, scale, SILU))
    torch.library.opcheck(torch.ops.drawloom.gate_halves_backward.default, (x, both, None, SILU))
