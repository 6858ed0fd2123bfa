"""Sources of named tensors, such as memory, and the bytes of tensors."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor


@attrs.frozen
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorSource(Protocol):
    """Named tensors, each read on request."""

    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor's shape and dtype, in a stable order."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One tensor, any shape, as stated in `specs`; it may share memory with the source, and must not be changed."""
        ...


@attrs.frozen
class InMemory:
    """A source of tensors in memory, which are not copied."""

    tensors: Mapping[str, Tensor]

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}

    def tensor(self, name: str) -> Tensor:
        """One tensor, any shape, detached and not copied."""
        return self.tensors[name].detach()


def empty(spec: TensorSpec) -> tuple[Tensor, memoryview]:
    """An uninitialized tensor, any shape (the spec's), on the CPU, and a writable view of its bytes."""
    memory = torch.empty(spec.bytes, dtype=torch.uint8)
    return from_memory(memory, spec), view(memory)


def from_memory(memory: Tensor, spec: TensorSpec) -> Tensor:
    """memory: (bytes,), uint8; the result is a view of spec.shape and spec.dtype, without a copy."""
    return memory.view(spec.dtype).view(spec.shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """tensor: any shape, any dtype; its bytes in row-major order, copied only if not on the CPU or not contiguous."""
    # Lazily negated and conjugated tensors have other bytes than values.
    dense = tensor.detach().cpu().contiguous().resolve_neg().resolve_conj()
    return view(dense.view(-1).view(torch.uint8))


def view(memory: Tensor) -> memoryview:
    """memory: (bytes,), uint8, on the CPU; a writable view of its bytes."""
    array: Any = memory.numpy()
    return memoryview(array)
