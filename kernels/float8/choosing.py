"""Float8's implementation for a device."""

from typing import Literal

import torch

from drawloom.kernels.float8.casts import lacks_float8
from drawloom.kernels.float8.grouped_casts import EAGER, GroupedFloat8Kernels
from drawloom.kernels.operation import why_no_triton

Implementation = Literal["auto", "eager", "triton"]


def choose_float8_kernels(device: torch.device, implementation: Implementation = "auto") -> GroupedFloat8Kernels:
    """
    Return an implementation: `auto` is Triton on GPUs that have it, and plain torch elsewhere.

    Raises ValueError if Triton is requested and can't run on the device.
    """
    why_not = why_no_triton(device)
    if implementation == "triton" and why_not:
        raise ValueError(why_not)
    if implementation == "eager" or (implementation == "auto" and (device.type == "cpu" or why_not)):
        return EAGER
    from drawloom.kernels.float8.triton_grouped_casts import TRITON

    return TRITON


def choose_row_casts(device: torch.device) -> GroupedFloat8Kernels:
    """Return the implementation for casts alone: plain torch on GPUs without products in float8."""
    return EAGER if lacks_float8(device) else choose_float8_kernels(device)
