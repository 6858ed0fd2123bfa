"""Grouped products in Triton against the eager ones in float64."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from drawloom.kernels.deferral import Deferral
from drawloom.kernels.grouped_gemm import grouped_gemm_eager
from drawloom.kernels.triton.grouped_gemm import grouped_gemm_triton
from support.kernels import DEVICE, assert_all_close, assert_close, drawn, dtypes, exact, few, layouts


def ends_of(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(DEVICE, torch.int32)


@few
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(0, 5),
    st.integers(1, 90),
    st.integers(1, 40),
    dtypes,
    st.tuples(layouts, layouts, layouts),
    st.booleans(),
)
def test_equals_eager(
    counts: list[int],
    unused: int,
    inputs: int,
    outputs: int,
    dtype: torch.dtype,
    layout: tuple[str, str, str],
    transposed: bool,
) -> None:
    """Any numbers of rows, none at all among them, any sizes and strides, give rows and gradients of float64."""
    rows, ends = sum(counts) + unused, ends_of(counts)
    shape = (outputs, inputs) if transposed else (inputs, outputs)
    x = drawn(layout[0], rows, inputs, dtype=dtype)
    weight = drawn(layout[1], len(counts), *shape, dtype=dtype, scale=inputs**-0.5)
    grad = drawn(layout[2], rows, outputs, dtype=dtype).detach()
    with torch.no_grad():
        x[rows - unused :] = torch.nan
        grad[rows - unused :] = torch.nan
    wide, used = exact(x, weight), slice(rows - unused)
    found = grouped_gemm_triton(x, weight, ends, transposed)
    expected = grouped_gemm_eager(wide[0], wide[1], ends, transposed)
    assert found.dtype == dtype
    assert_close(found[used], expected[used], 2)
    ours = torch.autograd.grad(found, (x, weight), grad)
    theirs = torch.autograd.grad(expected, wide, grad.double())
    assert_all_close((ours[0][used], ours[1]), (theirs[0][used], theirs[1]), 4)


def test_tiles_of_several_experts() -> None:
    """Experts of more rows than a tile, beside empty and tiny ones, over several tiles of columns, are right."""
    ends = ends_of([300, 0, 1, 129, 0])
    x, weight = drawn("contiguous", 430, 70), drawn("contiguous", 5, 70, 140, scale=0.1)
    wide = exact(x, weight)
    found, expected = grouped_gemm_triton(x, weight, ends), grouped_gemm_eager(wide[0], wide[1], ends)
    assert_close(found, expected, 2)
    grads = torch.autograd.grad(found.square().sum(), (x, weight))
    assert_all_close(grads, torch.autograd.grad(expected.square().sum(), wide), 8)


def test_weight_gradient_can_wait() -> None:
    """Put off, the matrices' gradient comes later, and is what it would have been."""
    ends = ends_of([3, 0, 5])
    x, weight = drawn("contiguous", 8, 16), drawn("contiguous", 3, 16, 20)
    expected = torch.autograd.grad(grouped_gemm_triton(x, weight, ends).sum(), (x, weight))
    deferral = Deferral()
    with deferral.recording():
        result = grouped_gemm_triton(x, weight, ends)
    with deferral.putting_off():
        found = torch.autograd.grad(result.sum(), (x, weight), allow_unused=True)
    assert found[1] is None
    assert torch.equal(found[0], expected[0])
    assert torch.equal(deferral.take()[0].compute(), expected[1])


def test_is_an_operation_of_torch() -> None:
    """Both products keep the promises that torch.compile relies on."""
    x, weight = torch.randn(8, 16, device=DEVICE), torch.randn(3, 16, 20, device=DEVICE)
    torch.library.opcheck(torch.ops.drawloom.grouped_gemm_rows.default, (x, weight, ends_of([3, 0, 5])))
    torch.library.opcheck(torch.ops.drawloom.grouped_gemm_matrices.default, (x, x + 1, ends_of([3, 0, 5])))
