"""
Gradient scaling in Triton: one launch multiplies many tensors by a factor. torch's bfloat16 times float32 reaches a
ninth of a copy's rate.

The same pass sums squares in float64, by program and then over programs, always in the same order.

Sum over a few rows with 16-bit numbers in Triton, at a copy's rate; torch sums two rows at 0.4 times this rate.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language import constexpr

from drawloom.kernels.triton.primitives import cache_launches, cdiv, load_float32, upload

PART = 2**14
"""Elements that a program scales."""

BLOCK = 2048
"""Elements that a program loads at a time: 16 per thread, two loads of bfloat16."""


def scale_and_sum_squares_triton(tensors: Sequence[Tensor], factor: Tensor, counted: tuple[bool, ...]) -> Tensor:
    """
    Compute scale_and_sum_squares_eager for contiguous tensors with one dtype, with bitwise equal tensors; factor and
    sum are float64 ().

    If the factor is 1 and no tensor is counted, the kernel reads no tensor.
    """
    if not sum(tensor.numel() for tensor in tensors):
        return torch.zeros_like(factor)
    device = factor.device
    tables = _create_launch_tables(tuple(tensor.numel() for tensor in tensors), counted, device)
    pointers = [tensor.data_ptr() for tensor in tensors]
    addresses = upload(torch.tensor(pointers), device)  # gradients have new addresses in each step
    aligned = all(pointer % 16 == 0 for pointer in pointers)
    programs = len(tables[0])
    squares = factor.new_empty(programs) if any(counted) else None
    arguments = tensors[0], addresses, *tables, factor.float(), squares
    _scale_kernel[(programs,)](*arguments, PART=PART, BLOCK=BLOCK, ALIGNED=aligned)
    return torch.zeros_like(factor) if squares is None else squares.sum()


@lru_cache(maxsize=16)
def _create_launch_tables(
    sizes: tuple[int, ...], counted: tuple[bool, ...], device: torch.device
) -> tuple[Tensor, ...]:
    """
    Return tensor numbers by program, int32 (programs,), and by tensor, (tensors,), the number of its first program, its
    size in elements, and its `counted` flag: whether its squares are summed.
    """
    counts = torch.tensor([-(-size // PART) for size in sizes])
    owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(counts)
    tables = owners, counts.cumsum(0) - counts, torch.tensor(sizes), torch.tensor(counted)
    return tuple(upload(table, device) for table in tables)


# fmt: off
@cache_launches()
def _scale_kernel(
    like, addresses, owners, starts, sizes, counted, factor, squares,
    PART: constexpr, BLOCK: constexpr, ALIGNED: constexpr,
):
    # fmt: on
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    base = tl.load(addresses + owner).to(like.dtype)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    start, size, scale = (program - tl.load(starts + owner)) * PART, tl.load(sizes + owner), tl.load(factor)
    if squares is None:
        size = tl.where(scale == 1.0, 0, size)
    total = tl.zeros((), tl.float64)
    for block in range(0, tl.minimum(PART, size - start), BLOCK):
        element = start + block + tl.arange(0, BLOCK)
        # With a mask of unknown length, each load would be of two bytes.
        if start + block + BLOCK <= size:
            total += _scale_block(base + element, None, scale, squares is not None)
        else:
            total += _scale_block(base + element, element < size, scale, squares is not None)
    if squares is not None:
        tl.store(squares + program, tl.where(tl.load(counted + owner), total, 0.0))


@triton.jit
def _scale_block(pointers, mask, scale, squared: constexpr):
    """Scale a block in place, and return the products' sum of squares if `squared`, else 0."""
    product = (tl.load(pointers, mask=mask).to(tl.float32) * scale).to(pointers.dtype.element_ty)
    tl.store(pointers, product, mask=mask)
    if not squared:
        return tl.zeros((), tl.float64)
    wide = product.to(tl.float32).to(tl.float64)
    if mask is not None:
        wide = tl.where(mask, wide, 0.0)
    return tl.sum(wide * wide, 0)


SUM_BLOCK = 4096


def sum_parts_triton(own: Tensor, others: Tensor, out: Tensor) -> None:
    """Compute sum_parts_eager: own (n,), others (rows, n) with contiguous rows, out (n,), with one 16-bit dtype."""
    rows, size = others.shape
    if size:
        _sum_parts_kernel[(cdiv(size, SUM_BLOCK),)](
            own, others, others.stride(0), out, size, ROWS=rows, BLOCK=SUM_BLOCK
        )


@cache_launches()
def _sum_parts_kernel(own, others, stride, out, size, ROWS: constexpr, BLOCK: constexpr):
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = load_float32(own + element, element < size)
    for _ in range(ROWS):
        total += load_float32(others + element, element < size)
        others += stride  # the product of row and stride would have 32 bits
    tl.store(out + element, total, mask=element < size)
