"""
Many tensors times one factor in one launch: torch's product of bfloat16 and float32 reaches a ninth of a copy.

Squares are added up in float64 in the same pass, for each block and then over blocks, always in the same order.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.triton.launch import lean
from drawloom.kernels.triton.primitives import upload

PART = 2**14
"""Elements that a program scales."""

BLOCK = 2048
"""Elements that a program holds at a time: 16 a thread, two loads of bfloat16."""


def scale_triton(tensors: Sequence[Tensor], factor: Tensor, counted: tuple[bool, ...]) -> Tensor:
    """
    Do the same as scale_eager, the tensors bitwise: contiguous ones of one dtype, factor and result float64 () there.

    A factor of 1 leaves tensors alone if none is counted, and reads none of them.
    """
    if not sum(tensor.numel() for tensor in tensors):
        return torch.zeros_like(factor)
    device = factor.device
    tables = _tables(tuple(tensor.numel() for tensor in tensors), counted, device)
    pointers = [tensor.data_ptr() for tensor in tensors]
    addresses = upload(torch.tensor(pointers), device)  # new gradients have new addresses in each step
    aligned = all(pointer % 16 == 0 for pointer in pointers)
    programs = len(tables[0])
    squares = factor.new_empty(programs) if any(counted) else None
    arguments = tensors[0], addresses, *tables, factor.float(), squares
    _kernel[(programs,)](*arguments, PART=PART, BLOCK=BLOCK, ALIGNED=aligned)
    return torch.zeros_like(factor) if squares is None else squares.sum()


@lru_cache(maxsize=16)
def _tables(sizes: tuple[int, ...], counted: tuple[bool, ...], device: torch.device) -> tuple[Tensor, ...]:
    """
    The tensor of each program (programs,); of each tensor, the first program, the number of elements, and whether their
    squares count.
    """
    counts = torch.tensor([-(-size // PART) for size in sizes])
    owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(counts)
    tables = owners, counts.cumsum(0) - counts, torch.tensor(sizes), torch.tensor(counted)
    return tuple(upload(table, device) for table in tables)


# fmt: off
@lean
@triton.jit
def _kernel(
    like, addresses, owners, starts, sizes, counted, factor, squares,
    PART: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):
    # fmt: on
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    base = tl.load(addresses + owner).to(like.dtype)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    start, size, by = (program - tl.load(starts + owner)) * PART, tl.load(sizes + owner), tl.load(factor)
    if squares is None:
        size = tl.where(by == 1.0, 0, size)
    total = tl.zeros((), tl.float64)
    for block in range(0, tl.minimum(PART, size - start), BLOCK):
        place = start + block + tl.arange(0, BLOCK)
        # A mask of unknown length would make each load one of two bytes.
        if start + block + BLOCK <= size:
            total += _scale(base + place, None, by, squares is not None)
        else:
            total += _scale(base + place, place < size, by, squares is not None)
    if squares is not None:
        tl.store(squares + program, tl.where(tl.load(counted + owner), total, 0.0))


@triton.jit
def _scale(pointers, mask, by, squared: tl.constexpr):
    """Scale a block; the sum of the squares of the products, if that is asked for."""
    product = (tl.load(pointers, mask=mask).to(tl.float32) * by).to(pointers.dtype.element_ty)
    tl.store(pointers, product, mask=mask)
    if not squared:
        return tl.zeros((), tl.float64)
    kept = product.to(tl.float32).to(tl.float64)
    if mask is not None:
        kept = tl.where(mask, kept, 0.0)
    return tl.sum(kept * kept, 0)
