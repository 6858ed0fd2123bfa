"""The sum of what programs have added up, each for itself, in a fixed order: the same to the bit each time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, AT_ONCE = 32, 64
"""Columns of a program, 128 bytes of float32, and how many parts of them it adds at once."""


def reduce_partials(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """parts (count, width), contiguous and in float32, as their sum (width,) in another dtype."""
    count, width = parts.shape
    result = parts.new_empty(width, dtype=dtype)
    _kernel[(triton.cdiv(width, BLOCK),)](
        parts, result, count, width, BLOCK=BLOCK, AT_ONCE=AT_ONCE, num_warps=4, enable_fp_fusion=True
    )
    return result


@triton.jit(do_not_specialize=["count"])
def _kernel(parts, result, count, width, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((AT_ONCE, BLOCK), tl.float32)
    for first in range(0, count, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        inside = (part < count)[:, None] & (column < width)[None, :]
        total += tl.load(parts + part.to(tl.int64)[:, None] * width + column[None, :], mask=inside, other=0.0)
    tl.store(result + column, tl.sum(total, 0).to(result.dtype.element_ty), mask=column < width)
