"""What the kernels share: launch parameters, products in float32, sums of partial results, rounding."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.stochastic_copy import ROUNDS as PHILOX_ROUNDS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What the Triton kernels take; they compute in float32."""


def check_floats(name: str, *tensors: Tensor) -> None:
    """TypeError if a kernel is given what it does not compute with."""
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{name} takes float32, bfloat16 or float16, and this is {tensor.dtype}; use its eager twin"
            )


def as_rows(x: Tensor) -> Tensor:
    """(..., width) as (rows, width) whose last stride is 1: a view where the strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def contiguous_last_dim(x: Tensor) -> Tensor:
    """The same tensor with a last stride of 1: itself where it has that."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def angle_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (rows, length, pairs) of equal strides, the last one 1."""
    cos, sin = contiguous_last_dim(cos), contiguous_last_dim(sin)
    return (cos, sin) if cos.stride() == sin.stride() else (cos.contiguous(), sin.contiguous())


@cache
def sm_count(device: torch.device) -> int:
    """How many multiprocessors a GPU has; 4 stand for a CPU, where programs run one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def next_power_of_2(number: int) -> int:
    """The least power of two that is no less than a positive number."""
    return 1 << (number - 1).bit_length()


def addmm_fp32(summed: Tensor, a: Tensor, b: Tensor) -> None:
    """summed += a @ b, with summed in float32 and a and b of one dtype."""
    if summed.is_cuda and a.dtype != torch.float32:
        torch.addmm(summed, a, b, out_dtype=torch.float32, out=summed)
    else:
        summed.addmm_(a.float(), b.float())


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


ROUNDS = tl.constexpr(PHILOX_ROUNDS)


@triton.jit
def words(key, draw, counter):
    """Four words of 32 random bits for each draw (int64), of a key and a counter of any integer types."""
    # Triton types numbers by their size; and its interpreter holds those from 2^31 to 2^32 - 1, which it calls int64,
    # in 32 bits, of which a shift by 32 is no number of the upper half.
    counter = tl.cast(counter, tl.uint64)
    low, high = draw.to(tl.uint32), (draw >> 32).to(tl.uint32)
    counter_low, counter_high = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    return tl.philox(key, low, high, low * 0 + counter_low, low * 0 + counter_high, ROUNDS)


@triton.jit
def halves(word):
    """The lower and the upper 16 bits of each of n words, as 2 n numbers."""
    return tl.interleave(word & 0xFFFF, word >> 16)


@triton.jit
def round_stochastically(x, noise):
    """float32 as bfloat16, with 16 bits of noise for each element."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = tl.where(x != x, (bits >> 16) | 0x40, (bits + noise) >> 16)
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
