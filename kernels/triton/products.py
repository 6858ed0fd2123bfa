"""Sums of matrix products in float32, whatever the factors are."""

import torch
from torch import Tensor


def addmm_fp32(summed: Tensor, a: Tensor, b: Tensor) -> None:
    """summed += a @ b, with summed in float32 and a and b of one dtype."""
    if summed.is_cuda and a.dtype != torch.float32:
        torch.addmm(summed, a, b, out_dtype=torch.float32, out=summed)
    else:
        summed.addmm_(a.float(), b.float())
