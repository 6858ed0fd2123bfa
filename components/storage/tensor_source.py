"""Sources of named tensors (a folder, memory, another source in another dtype), and tensors as bytes of files."""

import math
from collections.abc import Mapping
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor


@attrs.frozen
class TensorSpec:
    """What is known of a tensor before it is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorSource(Protocol):
    """Named tensors, each read when it is asked for. A source may stand on another, and change what it gives."""

    @property
    def owns_memory(self) -> bool:
        """Whether nobody else holds what `tensor` gives, so that it may be kept and changed."""
        ...

    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor's shape and dtype, in a stable order."""
        ...

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU or where it lives."""
        ...


@attrs.frozen
class InMemory:
    """Tensors that are there already."""

    tensors: Mapping[str, Tensor]
    owns_memory: bool = attrs.field(init=False, default=False)

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name].detach()


@attrs.frozen
class AsType:
    """A source with every floating-point tensor in one dtype."""

    source: TensorSource
    dtype: torch.dtype

    @property
    def owns_memory(self) -> bool:
        return self.source.owns_memory

    def specs(self) -> Mapping[str, TensorSpec]:
        return {name: attrs.evolve(spec, dtype=self._to(spec.dtype)) for name, spec in self.source.specs().items()}

    def tensor(self, name: str) -> Tensor:
        tensor = self.source.tensor(name)
        return tensor.to(self._to(tensor.dtype))

    def _to(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if dtype.is_floating_point else dtype


def empty(spec: TensorSpec) -> tuple[Tensor, memoryview]:
    """An uninitialised tensor on the CPU, and its bytes."""
    memory = torch.empty(spec.bytes, dtype=torch.uint8)
    return from_memory(memory, spec), view(memory)


def from_memory(memory: Tensor, spec: TensorSpec) -> Tensor:
    """uint8 memory as a tensor of this shape and dtype, without a copy."""
    return memory.view(spec.dtype).view(spec.shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes, row by row and little-endian; copied only if it is not on the CPU, or not contiguous."""
    dense = tensor.detach().cpu().contiguous().resolve_neg().resolve_conj()
    return view(dense.view(-1).view(torch.uint8))


def view(memory: Tensor) -> memoryview:
    """The bytes of a uint8 tensor on the CPU, to be read and written in place."""
    array: Any = memory.numpy()
    return memoryview(array)
