"""Expert biases in Triton against the eager implementation in float64."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.kernels.grouped_gemm.eager import add_expert_bias_eager
from drawloom.kernels.grouped_gemm.triton import add_expert_bias_triton
from support.kernels import DEVICE, assert_all_close, assert_close, draw_tensor, dtypes, exact, few, layouts
from support.seeding import seeds


@few
@given(
    seeds,
    st.lists(st.integers(0, 40), min_size=1, max_size=6),
    st.integers(0, 5),
    st.integers(1, 300),
    dtypes,
    st.tuples(layouts, layouts, layouts),
    st.booleans(),
)
def test_triton_equals_eager(
    _seed: object,
    counts: list[int],
    unused: int,
    width: int,
    dtype: torch.dtype,
    layout: tuple[str, str, str],
    has_scale: bool,
) -> None:
    """Any row counts, also 0, sizes and strides agree with float64 in rows and gradients."""
    rows, ends = sum(counts) + unused, torch.tensor(counts).cumsum(0).to(DEVICE, torch.int32)
    x = draw_tensor(layout[0], rows, width, dtype=dtype)
    bias = draw_tensor(layout[1], len(counts), width, dtype=dtype)
    grad = draw_tensor(layout[2], rows, width, dtype=dtype).detach()
    inputs = (x, bias, draw_tensor("contiguous", rows)) if has_scale else (x, bias)
    with torch.no_grad():
        x[rows - unused :] = torch.nan
        grad[rows - unused :] = torch.nan
    wide, used = exact(*inputs), slice(rows - unused)
    actual = add_expert_bias_triton(inputs[0], inputs[1], ends, *inputs[2:])
    expected = add_expert_bias_eager(wide[0], wide[1], ends, *wide[2:])
    assert actual.dtype == dtype
    assert_close(actual[used], expected[used])
    results = torch.autograd.grad(actual, inputs, grad)
    references = torch.autograd.grad(expected, wide, grad.double())
    assert_close(results[0][used], references[0][used])
    assert_all_close(results[1:], references[1:], 2)
