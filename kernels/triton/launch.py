"""What Triton kernels need around them: dtypes, rows of tensors, sizes of grids."""

from functools import cache

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What the Triton kernels take; they compute in float32."""


def check_floats(name: str, *tensors: Tensor) -> None:
    """TypeError if a kernel is given what it does not compute with."""
    for tensor in tensors:
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{name} takes float32, bfloat16 or float16, and this is {tensor.dtype}; use its eager twin"
            )


def as_rows(x: Tensor) -> Tensor:
    """(..., width) as (rows, width) whose last stride is 1: a view where the strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def contiguous_last_dim(x: Tensor) -> Tensor:
    """The same tensor with a last stride of 1: itself where it has that."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def angle_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines (rows, length, pairs) of equal strides, the last one 1."""
    cos, sin = contiguous_last_dim(cos), contiguous_last_dim(sin)
    return (cos, sin) if cos.stride() == sin.stride() else (cos.contiguous(), sin.contiguous())


@cache
def sm_count(device: torch.device) -> int:
    """How many multiprocessors a GPU has; 4 stand for a CPU, where programs run one after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def next_power_of_2(number: int) -> int:
    """The least power of two that is no less than a positive number."""
    return 1 << (number - 1).bit_length()
