"""The causal convolution in Triton against the eager one in float64."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from drawloom.kernels.gated_delta.eager import causal_conv_eager
from drawloom.kernels.gated_delta.triton import causal_conv_triton
from support.kernels import DEVICE, assert_all_close, draw_tensor, dtypes, exact, few, layouts
from support.seeding import seeds

shapes = st.tuples(st.integers(0, 2), st.sampled_from([0, 1, 5, 64, 70]), st.sampled_from([1, 12, 70]))


@few
@given(seeds, shapes, st.integers(1, 5), dtypes, layouts, st.sampled_from([0.02, 0.5]), st.booleans())
def test_triton_equals_eager(
    _seed: object, shape: tuple[int, int, int], taps: int, dtype: torch.dtype, layout: str, often: float, silu: bool
) -> None:
    """Any shape, strides and documents give the result and gradients of float64."""
    x, weight = draw_tensor(layout, *shape, dtype=dtype), draw_tensor("contiguous", shape[2], taps)
    ids = (torch.rand(shape[:2], device=DEVICE) < often).cumsum(1, dtype=torch.int32)
    wide = exact(x, weight)
    actual, expected = causal_conv_triton(x, weight, ids, silu), causal_conv_eager(wide[0], wide[1], ids, silu)
    assert actual.dtype == dtype
    assert_all_close([actual], [expected], 1.5)
    grad = draw_tensor(layout, *shape, dtype=dtype).detach()
    grads = torch.autograd.grad(actual, (x, weight), grad)
    expected_grads = torch.autograd.grad(expected, wide, grad.double(), retain_graph=True)
    # The gradient of x is rounded before SiLU and at the end.
    assert_all_close([grads[0]], [expected_grads[0]], 3.0)
    # The weight's gradient is a sum over tokens that may cancel: its terms are rounded, not the sum.
    terms = [
        torch.autograd.grad(expected[:, token], wide[1], grad[:, token].double(), retain_graph=True)[0].abs()
        for token in range(shape[1])
    ]
    error, size = (grads[1].double() - expected_grads[1]).norm(), sum(terms, torch.ones_like(wide[1])).norm()
    assert error <= 3.0 * torch.finfo(dtype).eps * size, float(error / size)


def test_documents_are_isolated_to_the_bit() -> None:
    """A document's bits do not depend on others, and its loss has zero gradients elsewhere."""
    x, weight = draw_tensor("contiguous", 1, 70, 5), draw_tensor("contiguous", 5, 4)
    ids = torch.arange(70, device=DEVICE, dtype=torch.int32)[None] // 30
    changed = torch.where(ids[..., None] == 1, x, 7.0)
    ours = ids[0] == 1
    actual = causal_conv_triton(x, weight, ids)[:, ours]
    assert torch.equal(actual, causal_conv_triton(changed, weight, ids)[:, ours])
    assert not bool(torch.autograd.grad(actual.sum(), x)[0][:, ~ours].any())
