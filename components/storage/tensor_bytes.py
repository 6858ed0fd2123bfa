"""Tensors as the bytes of files: little-endian, row by row."""

from typing import Any

import torch
from torch import Tensor

from drawloom.components.storage.tensor_source import TensorSpec


def empty(kind: TensorSpec) -> tuple[Tensor, memoryview]:
    """A tensor of unknown numbers on the CPU, and its memory."""
    memory = torch.empty(kind.bytes, dtype=torch.uint8)
    return from_memory(memory, kind), view(memory)


def from_memory(memory: Tensor, kind: TensorSpec) -> Tensor:
    """Bytes as a tensor, without a copy."""
    return memory.view(kind.dtype).view(kind.shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes; a copy only if it is elsewhere than on the CPU, or not row by row."""
    dense = tensor.detach().cpu().contiguous().resolve_neg().resolve_conj()
    return view(dense.view(-1).view(torch.uint8))


def view(memory: Tensor) -> memoryview:
    """The bytes of a tensor of bytes on the CPU, to be read and written in place."""
    array: Any = memory.numpy()
    return memoryview(array)
