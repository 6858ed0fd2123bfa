"""Sums over a few rows of numbers of 16 bits, rounded once: parts of gradients that ranks sent."""

import torch
from torch import Tensor

from drawloom.kernels.operation import why_no_triton


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """Put the float32 sum over the rows of parts (rows, n) in out (n,), rounded; both bfloat16 or float16, dense."""
    if parts.device.type == "cpu" or why_no_triton(parts.device):  # on a CPU, Triton would interpret
        return sum_parts_eager(parts, out)
    from drawloom.kernels.triton.sum_parts import sum_parts_triton

    sum_parts_triton(parts, out)


def sum_parts_eager(parts: Tensor, out: Tensor) -> None:
    """The same in torch, whose sums of 16 bits are float32 until they are done."""
    torch.sum(parts, 0, out=out)
