"""
Gradient scaling: multiply many tensors by one factor that only the device knows, and sum the squares.

Sum over a few rows with 16-bit numbers, rounded once: a gradient's parts from other ranks.
"""

from collections.abc import Sequence
from itertools import compress

import torch
from torch import Tensor

from drawloom.kernels.availability import why_no_triton


def scale_and_sum_squares(tensors: Sequence[Tensor], factor: Tensor, counted: Sequence[bool] = ()) -> Tensor:
    """
    Multiply tensors (any shapes and float dtypes) in place by a factor, float64 () on their device.

    Every product is rounded once. Returns the products' sum of squares, float64 () on the device, over the tensors
    whose flag in `counted` is True; without flags, no tensor is counted.
    """
    counted = counted or [False] * len(tensors)
    total = torch.zeros_like(factor)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        has_triton = dtype != torch.float64 and factor.is_cuda and not why_no_triton(factor.device)
        for by_triton in (False, True):
            chosen = [
                tensor.dtype == dtype and (has_triton and tensor.is_contiguous()) == by_triton for tensor in tensors
            ]
            if any(chosen):
                part, flags = [*compress(tensors, chosen)], (*compress(counted, chosen),)
                if by_triton:
                    from drawloom.kernels.gradients.triton import scale_and_sum_squares_triton

                    total += scale_and_sum_squares_triton(part, factor, flags)
                else:
                    total += scale_and_sum_squares_eager(part, factor, flags)
    return total


def scale_and_sum_squares_eager(tensors: Sequence[Tensor], factor: Tensor, counted: Sequence[bool]) -> Tensor:
    """
    Compute `scale_and_sum_squares` for tensors with one dtype and one flag per tensor; products with 16-bit numbers are
    in float32.
    """
    if tensors and tensors[0].dtype.itemsize >= 4:
        torch._foreach_mul_(list(tensors), factor.to(tensors[0].dtype))
    else:
        for tensor in tensors:
            # torch would round a factor without dimensions to the tensors' dtype; with dimensions it uses float32.
            tensor.mul_(factor.float().reshape((1,) * tensor.ndim))
    if not any(counted):
        return torch.zeros_like(factor)
    norms = torch._foreach_norm(list(compress(tensors, counted)), 2, dtype=torch.float64)
    return torch.stack([*norms]).square().sum()


def sum_parts(own: Tensor, others: Tensor, out: Tensor) -> None:
    """
    Write the float32 sum of own (n,) and others' rows (rows, n) to out (n,), rounded.

    All are bfloat16, or all are float16; a row is contiguous, but rows may be apart.
    """
    if own.device.type == "cpu" or why_no_triton(own.device):  # on a CPU, Triton would be interpreted
        return sum_parts_eager(own, others, out)
    from drawloom.kernels.gradients.triton import sum_parts_triton

    sum_parts_triton(own, others, out)


def sum_parts_eager(own: Tensor, others: Tensor, out: Tensor) -> None:
    """Compute `sum_parts` in plain torch, in the same order."""
    total = own.float()
    for row in others:
        total += row
    out.copy_(total)
