"""Many tensors times one factor that only their device knows, each product rounded once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drawloom.kernels.operation import why_no_triton


def scale(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors, of any shapes and float dtypes, in place by a factor, float64 () on their device."""
    for dtype in {tensor.dtype for tensor in tensors}:
        group = [tensor for tensor in tensors if tensor.dtype == dtype]
        if dtype == torch.float64 or not factor.is_cuda or why_no_triton(factor.device):
            scale_eager(group, factor)
        else:
            from drawloom.kernels.triton.scale import scale_triton

            scale_triton(group, factor)


def scale_eager(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """
    Multiply tensors of one dtype, of any shapes, in place by a factor, float64 () on their device.

    Products of 16 bits are in float32.
    """
    if tensors and tensors[0].dtype.itemsize >= 4:
        torch._foreach_mul_(list(tensors), factor.to(tensors[0].dtype))
        return
    for tensor in tensors:
        # A factor of no dimensions would be rounded to the tensors' dtype; with some, torch computes in float32.
        tensor.mul_(factor.float().reshape((1,) * tensor.ndim))
