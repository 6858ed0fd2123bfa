"""Sources for named tensors, and conversions between tensors and bytes."""

import hashlib
import math
from collections.abc import Mapping
from typing import Protocol

import attrs
import torch
from torch import Tensor

DIGITS = 16
"""Hexadecimal digits of a digest, enough to distinguish tensors."""


@attrs.frozen
class TensorSpec:
    """A tensor's shape and dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorSource(Protocol):
    """Named tensors, read on request."""

    def specs(self) -> Mapping[str, TensorSpec]:
        """Return shapes and dtypes by tensor name, in a stable order."""

    def tensor(self, name: str) -> Tensor:
        """Return a tensor with the spec in `specs`. It may share memory with the source, and must not be modified."""


def allocate_tensor_and_byte_view(spec: TensorSpec) -> tuple[Tensor, memoryview]:
    """Return an uninitialized CPU tensor with the spec's shape, and a writable view of its bytes."""
    memory = torch.empty(spec.bytes, dtype=torch.uint8)
    return view_as_tensor(memory, spec), memory.numpy().data


def view_as_tensor(memory: Tensor, spec: TensorSpec) -> Tensor:
    """View memory, uint8 (bytes,), as a tensor with the spec's shape and dtype."""
    return memory.view(spec.dtype).view(spec.shape)


def view_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's bytes, any shape and dtype, in row-major order; copies only if necessary."""
    # lazily negated and conjugated tensors store other bytes than their values
    dense = tensor.detach().cpu().contiguous().resolve_neg().resolve_conj()
    return dense.view(-1).view(torch.uint8).numpy().data


def hash_tensor_bytes(tensor: Tensor) -> str:
    """Return the digest of a tensor's bytes, any shape and dtype."""
    return hash_bytes(view_bytes(tensor))


def hash_bytes(data: memoryview | bytes) -> str:
    """Return a digest of bytes: the first DIGITS of a SHA-256."""
    return hashlib.sha256(data).hexdigest()[:DIGITS]
