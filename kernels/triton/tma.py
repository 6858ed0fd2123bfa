"""
TMA (tensor memory accelerator) on GPUs from Hopper on: copies a tensor's blocks to shared memory.

Kernels take a tensor descriptor instead of an address and strides; elements beyond the tensor's ends are zeros.
"""

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

CAPABILITY = (9, 0)
"""Minimum compute capability, that of Hopper."""

ALIGNMENT = 16
"""Bytes at whose multiples a tensor and all of its rows must begin."""


def is_supported(device: torch.device) -> bool:
    """Return whether a device has TMA."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def can_copy_blocks_of(x: Tensor) -> bool:
    """Return whether TMA can copy blocks of x (any shape) in half precision; other dtypes gain nothing."""
    strides = [stride * x.element_size() for stride in x.stride()[:-1]]
    is_aligned = x.data_ptr() % ALIGNMENT == 0 and all(stride and stride % ALIGNMENT == 0 for stride in strides)
    return is_aligned and x.element_size() == 2 and x.stride(-1) == 1 and x.numel() > 0


def create_block_descriptor(x: Tensor, *block: int) -> TensorDescriptor:
    """Return a descriptor for x (any shape; see `can_copy_blocks_of`), in blocks with so many elements by dimension."""
    return TensorDescriptor.from_tensor(x, [*block])
