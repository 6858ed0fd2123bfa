"""Process group with one rank, and memory of the processes on a host."""

import json
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from drawloom.ports import Group, Pending, SymmetricMemory


@attrs.frozen(eq=False)
class HostMemory:
    """Shared memory for processes on one host, by a mapped file; `barrier` blocks the host."""

    parts: Sequence[Tensor]
    group: Group

    def barrier(self) -> None:
        self.group.sum(torch.zeros(1))


class Done:
    """An operation without work left: completed from the start."""

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""


class SingleProcess:
    """Group with one rank, where every collective is the identity."""

    rank = 0
    size = 1
    device = torch.device("cpu")
    may_break = False

    def sum(self, tensor: Tensor) -> None:
        """Leave a tensor (any shape) unchanged: it is its own sum."""

    def start_sum(self, tensor: Tensor) -> Pending:
        """Leave a tensor (any shape) unchanged."""
        return Done()

    def max(self, tensor: Tensor) -> None:
        """Leave a tensor (any shape) unchanged: it is its own maximum."""

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Leave a tensor (any shape) unchanged."""

    def gather_json(self, value: Any) -> list[Any]:
        """Return a list with the value, after a round trip through JSON as with more ranks."""
        return [json.loads(json.dumps(value))]

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensor (...) as the only one, (1, ...)."""
        return tensor.detach()[None]

    def start_gather(self, tensor: Tensor) -> tuple[Tensor, Pending]:
        """Return the tensor (...) as the only one, (1, ...)."""
        return self.gather(tensor), Done()

    def gather_unequal_shapes(self, tensor: Tensor) -> Sequence[Tensor]:
        """Return the tensor (...) as the only one."""
        return [tensor.detach()]

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Return the only part (...) in parts (1, ...)."""
        return parts[0]

    def start_reduce_scatter(self, parts: Tensor) -> tuple[Tensor, Pending]:
        """Return the only part (...) in parts (1, ...)."""
        return self.reduce_scatter(parts), Done()

    def start_shift(self, sent: Tensor, received: Tensor, distance: int) -> Pending:
        """Copy the tensor (any shape): this rank is its own neighbour."""
        received.copy_(sent)
        return Done()

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return the rows (rows, ...) unchanged."""
        return rows.detach()

    def raise_if_broken(self) -> None:
        """Return at once: no other rank can be lost."""

    def wait_and_raise_if_broken(self) -> None:
        """Return at once."""

    def allocate_symmetric_memory(self, size: int) -> SymmetricMemory:
        """Return `size` bytes on the CPU."""
        return HostMemory([torch.zeros(size, dtype=torch.uint8)], self)
