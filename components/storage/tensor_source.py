"""Where named tensors come from: a folder, memory, or another source in another dtype."""

import math
from collections.abc import Mapping
from typing import Protocol

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

    def kinds(self) -> Mapping[str, TensorSpec]:
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

    def kinds(self) -> Mapping[str, TensorSpec]:
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

    def kinds(self) -> Mapping[str, TensorSpec]:
        return {name: attrs.evolve(kind, dtype=self._to(kind.dtype)) for name, kind in self.source.kinds().items()}

    def tensor(self, name: str) -> Tensor:
        tensor = self.source.tensor(name)
        return tensor.to(self._to(tensor.dtype))

    def _to(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype if dtype.is_floating_point else dtype
