"""
TMA, by which GPUs from Hopper on copy blocks of a tensor to shared memory.

Kernels take a tensor's descriptor in place of its address and strides; elements behind the tensor's ends are zeros.
"""

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

CAPABILITY = (9, 0)
"""Hopper's."""

ALIGNMENT = 16
"""Bytes: a tensor and all its rows must begin at multiples of it."""


def is_there(device: torch.device) -> bool:
    """Whether a device has TMA."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= CAPABILITY


def fits(x: Tensor) -> bool:
    """Whether TMA can copy blocks of x (any shape), which is of half precision: others gain nothing."""
    starts = [stride * x.element_size() for stride in x.stride()[:-1]]
    aligned = x.data_ptr() % ALIGNMENT == 0 and all(start and start % ALIGNMENT == 0 for start in starts)
    return aligned and x.element_size() == 2 and x.stride(-1) == 1 and x.numel() > 0


def blocks(x: Tensor, *block: int) -> TensorDescriptor:
    """A descriptor of x, which fits, in blocks of that many elements in each dimension."""
    return TensorDescriptor.from_tensor(x, [*block])
