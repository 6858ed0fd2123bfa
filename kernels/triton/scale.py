"""Many tensors times one factor in one launch: torch's product of bfloat16 and float32 reaches a ninth of a copy."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from drawloom.kernels.scale import scale_eager
from drawloom.kernels.triton.launch import lean

BLOCK = 8192


def scale_triton(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """
    The same as scale_eager, bitwise: tensors of one dtype and any shapes, factor float64 () on their device.

    A factor of 1 leaves them alone, and reads none of them.
    """
    dense = [tensor for tensor in tensors if tensor.is_contiguous()]
    scale_eager([tensor for tensor in tensors if not tensor.is_contiguous()], factor)
    if not sum(tensor.numel() for tensor in dense):
        return
    device = factor.device
    owners, starts, sizes = _places(tuple(tensor.numel() for tensor in dense), device)
    pointers = [tensor.data_ptr() for tensor in dense]
    # From pinned memory, so that the host does not wait: new gradients have new addresses in each step.
    addresses = torch.tensor(pointers, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    aligned = all(pointer % 16 == 0 for pointer in pointers)
    grid = (len(owners),)
    _kernel[grid](dense[0], addresses, owners, starts, sizes, factor.float(), BLOCK=BLOCK, ALIGNED=aligned, num_warps=8)


@lru_cache(maxsize=16)
def _places(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The tensor of each program (programs,), and the first program and number of elements of each tensor."""
    counts = torch.tensor([-(-size // BLOCK) for size in sizes])
    owners = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(counts)
    return owners.to(device), (counts.cumsum(0) - counts).to(device), torch.tensor(sizes).to(device)


@lean
@triton.jit
def _kernel(like, addresses, owners, starts, sizes, factor, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    program = tl.program_id(0)
    owner = tl.load(owners + program)
    base = tl.load(addresses + owner).to(like.dtype)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    start, size, by = (program - tl.load(starts + owner)) * BLOCK, tl.load(sizes + owner), tl.load(factor)
    size = tl.where(by == 1.0, 0, size)
    place = start + tl.arange(0, BLOCK)
    # A mask of unknown length would make each load one of two bytes.
    if start + BLOCK <= size:
        tl.store(base + place, (tl.load(base + place).to(tl.float32) * by).to(like.dtype.element_ty))
    else:
        value = tl.load(base + place, mask=place < size).to(tl.float32)
        tl.store(base + place, (value * by).to(like.dtype.element_ty), mask=place < size)
