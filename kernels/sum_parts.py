"""Sum over a few rows with 16-bit numbers, rounded once: a gradient's parts from other ranks."""

from torch import Tensor

from drawloom.kernels.operation import why_no_triton


def sum_parts(own: Tensor, others: Tensor, out: Tensor) -> None:
    """
    Write the float32 sum of own (n,) and others' rows (rows, n) to out (n,), rounded.

    All are bfloat16, or all are float16; a row is contiguous, but rows may be apart.
    """
    if own.device.type == "cpu" or why_no_triton(own.device):  # on a CPU, Triton would be interpreted
        return sum_parts_eager(own, others, out)
    from drawloom.kernels.triton.sum_parts import sum_parts_triton

    sum_parts_triton(own, others, out)


def sum_parts_eager(own: Tensor, others: Tensor, out: Tensor) -> None:
    """Compute `sum_parts` in plain torch, in the same order."""
    total = own.float()
    for row in others:
        total += row
    out.copy_(total)
