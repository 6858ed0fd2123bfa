"""Gradients times a factor that only their device knows."""

from collections.abc import Sequence

import torch
from torch import Tensor


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients, of any shapes and real dtypes, in place by a factor, float64 () on their device."""
    for dtype in {gradient.dtype for gradient in gradients}:
        group = [gradient for gradient in gradients if gradient.dtype == dtype]
        if dtype.itemsize >= 4:
            torch._foreach_mul_(group, factor.to(dtype))
            continue
        # A factor of no dimensions would be rounded to the gradients' bfloat16; with some, torch computes in float32.
        for gradient in group:
            gradient.mul_(factor.float().reshape((1,) * gradient.ndim))
