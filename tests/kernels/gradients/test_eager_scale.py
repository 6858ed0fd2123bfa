"""Products of many tensors and one factor on their device."""

import pytest
import torch

from drawloom.kernels.gradients.eager import scale_and_sum_squares
from support.kernels import DEVICE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_factor_is_not_rounded_to_a_narrow_dtype(dtype: torch.dtype) -> None:
    """Products are in at least float32 and rounded once, also beside gradients of other dtypes."""
    factor = torch.tensor(1 / 3.7, dtype=torch.float64, device=DEVICE)
    wide = torch.promote_types(dtype, torch.float32)
    gradients = [torch.randn(shape, device=DEVICE).to(dtype) for shape in ((500,), (3, 4), (), (0, 2))]
    expected = [(gradient.to(wide) * factor.to(wide)).to(dtype) for gradient in gradients]
    others = [torch.ones(2, dtype=other, device=DEVICE) for other in (torch.float32, torch.bfloat16)]
    scale_and_sum_squares([others[0], *gradients, others[1]], factor)
    assert all(torch.equal(actual, right) for actual, right in zip(gradients, expected, strict=True))


def test_an_empty_list_is_accepted() -> None:
    """A pipeline rank whose parameters are all frozen has no gradients."""
    scale_and_sum_squares([], torch.tensor(2.0, dtype=torch.float64))


def test_squares_are_summed_over_counted_tensors() -> None:
    """The sum counts rounded products of all dtypes, and is 0 without counted tensors."""
    dtypes = (torch.bfloat16, torch.float32, torch.float64, torch.bfloat16, torch.bfloat16)
    sizes = (300, 5, 7, 0, 300)
    tensors = [torch.randn(2, size, device=DEVICE).to(dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    tensors[-1] = tensors[-1].T  # beside contiguous ones of the same dtype
    factor, counted = torch.tensor(0.3, dtype=torch.float64, device=DEVICE), [True, False, True, True, True]
    actual = scale_and_sum_squares(tensors, factor, counted)
    expected = sum(tensor.double().square().sum() for tensor, counts in zip(tensors, counted, strict=True) if counts)
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=0)
    assert scale_and_sum_squares(tensors, factor) == 0
