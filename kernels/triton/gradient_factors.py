"""Gradient factors in an optimizer's launch; products have the bits of tensors scaled in place."""

import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.scale import scale_and_sum_squares

ALIGNMENT = 16
"""Bytes per vectorized load; kernels read other tensors element by element."""


def cast_and_scale_if_mixed_dtypes(grads: list[Tensor], factors: Tensor | None) -> tuple[list[Tensor], Tensor | None]:
    """
    Return gradients (any shapes) in one dtype, as a launch needs, and remaining factors, float32 (factors,).

    Mixed dtypes are rare enough for copies.
    """
    if len({grad.dtype for grad in grads}) == 1:
        return grads, factors
    for factor in () if factors is None else factors.double():
        scale_and_sum_squares(grads, factor)
    return [grad.float() for grad in grads], None


def align_gradient(grad: Tensor) -> Tensor:
    """Return the gradient, contiguous and aligned for vectorized loads."""
    grad = grad.contiguous()
    return grad if grad.data_ptr() % ALIGNMENT == 0 else grad.clone()


@triton.jit
def multiply_by_factors(gradients, factors, FACTORS: tl.constexpr):
    """Return gradients, in float32, times all factors; every product is rounded to their own dtype."""
    dtype = gradients.dtype
    gradients = gradients.to(tl.float32)
    for number in tl.static_range(FACTORS):
        gradients = (gradients * tl.load(factors + number)).to(dtype).to(tl.float32)
    return gradients
