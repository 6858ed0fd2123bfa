"""Sums over a few rows of numbers of 16 bits, rounded once: parts of gradients that ranks sent."""

from torch import Tensor

from drawloom.kernels.operation import why_no_triton


def sum_parts(own: Tensor, others: Tensor, out: Tensor) -> None:
    """
    Put the float32 sum of own (n,) and the rows of others (rows, n) in out (n,), rounded.

    All are bfloat16, or all float16; rows are dense, but may be apart.
    """
    if own.device.type == "cpu" or why_no_triton(own.device):  # on a CPU, Triton would interpret
        return sum_parts_eager(own, others, out)
    from drawloom.kernels.triton.sum_parts import sum_parts_triton

    sum_parts_triton(own, others, out)


def sum_parts_eager(own: Tensor, others: Tensor, out: Tensor) -> None:
    """The same in torch, in the same order."""
    total = own.float()
    for row in others:
        total += row
    out.copy_(total)
