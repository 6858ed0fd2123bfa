"""Tensors that TMA can copy."""

import torch

from drawloom.kernels.triton import tma
from support.kernels import DEVICE


def test_half_precision_with_aligned_rows_fits() -> None:
    """TMA copies tensors in half precision that are not empty and whose rows are at multiples of 16 bytes."""
    x = torch.zeros(256, 16, dtype=torch.bfloat16, device=DEVICE)
    assert tma.can_copy_blocks_of(x) and tma.can_copy_blocks_of(x[1:]) and tma.can_copy_blocks_of(x[:, 8:])
    assert not tma.can_copy_blocks_of(x.float()) and not tma.can_copy_blocks_of(x[:0])
    assert (
        not tma.can_copy_blocks_of(x[:, :12].contiguous())
        and not tma.can_copy_blocks_of(x[:, 1:9])
        and not tma.can_copy_blocks_of(x.T.contiguous().T)
    )


def test_a_cpu_has_no_tma() -> None:
    """On a CPU, whose interpreter would accept descriptors, kernels read by pointers."""
    assert not tma.is_supported(torch.device("cpu"))
