"""Tensors kept for the backward pass that wait in host memory."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from weakref import ref

import attrs
import torch
from torch import Tensor

from drawloom.kernels.recompute.saved_tensors import KeptTensor
from drawloom.ports import Ticket, Transfers


@attrs.define(eq=False)
class Offloads:
    """Factory for offloaded tensors, with a pool of host memory by size, and tickets for when its copies end."""

    transfers: Transfers
    _pool: dict[int, list[tuple[Tensor, Ticket]]] = attrs.field(factory=lambda: defaultdict(list))

    def start_offload(self, kept: Iterable[ref[KeptTensor]], not_offloaded: Iterable[Tensor]) -> "OffloadedTensors":
        """
        Start to copy kept tensors to host memory, by storage; tensors in the storages of `not_offloaded` stay.

        Tensors that autograd has released already are left out.
        """
        stay = {tensor.untyped_storage()._cdata for tensor in not_offloaded}
        by_storage: dict[int, list[KeptTensor]] = defaultdict(list)
        for weak in kept:
            if (wrapper := weak()) is not None:
                storage = wrapper.get_or_recompute().untyped_storage()
                by_storage[storage._cdata if storage.nbytes() else 0].append(wrapper)
        groups = [wrappers for address, wrappers in by_storage.items() if address and address not in stay]
        return OffloadedTensors(self, [_Storage(wrappers) for wrappers in groups])

    def take_host_memory(self, byte_count: int) -> tuple[Tensor, Ticket]:
        """Return host memory, uint8 (size,), from the pool or new, and a ticket for the end of its last use."""
        return (
            self._pool[byte_count].pop()
            if self._pool[byte_count]
            else (self.transfers.allocate_pinned_host_memory(byte_count), None)
        )

    def return_host_memory(self, memory: Tensor, ticket: Ticket) -> None:
        """Return host memory to the pool; the ticket is for the end of its use."""
        self._pool[memory.numel()].append((memory, ticket))


class _Storage:
    """Wrappers around views of one storage, and the views' positions in it."""

    __slots__ = ("bytes", "views", "wrappers")

    def __init__(self, wrappers: Sequence[KeptTensor]) -> None:
        tensors = [wrapper.get_or_recompute() for wrapper in wrappers]
        self.wrappers = [ref(wrapper) for wrapper in wrappers]
        self.views = [(tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()) for tensor in tensors]
        storage = tensors[0].untyped_storage()
        self.bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def point_views_to(self, memory: Tensor) -> None:
        """Replace the wrappers' tensors by equal views into other memory, uint8 (bytes,)."""
        for weak, (dtype, shape, strides, offset) in zip(self.wrappers, self.views, strict=True):
            if (wrapper := weak()) is not None:
                whole = torch.empty(0, dtype=dtype, device=memory.device)
                view = whole.set_(memory.untyped_storage(), offset, shape, strides)
                wrapper.replace(view)


class OffloadedTensors:
    """
    A microbatch's activations on their way to host memory and back.

    After `free_device_memory`, wrappers are views of host memory; after `reload` and `wait` again of the device's.
    """

    def __init__(self, offloads: Offloads, storages: Sequence[_Storage]) -> None:
        self._offloads, self._storages = offloads, storages
        taken = [offloads.take_host_memory(storage.bytes.numel()) for storage in storages]
        self._host = [memory for memory, _ in taken]
        transfers = offloads.transfers
        copies = [(memory, storage.bytes) for memory, storage in zip(self._host, storages, strict=True)]
        self._left = transfers.copy_to_host(copies, [transfers.mark_computation(), *(ticket for _, ticket in taken)])
        self._arrived: Ticket = None
        self._was_freed = self._was_reloaded = False

    @property
    def byte_count(self) -> int:
        """Return the bytes copied to host memory."""
        return sum(memory.numel() for memory in self._host)

    def free_device_memory(self) -> None:
        """Free the device memory after the copies to the host. Later calls do nothing."""
        if self._was_freed:
            return
        self._offloads.transfers.make_computation_wait(self._left)
        for storage, memory in zip(self._storages, self._host, strict=True):
            storage.point_views_to(memory)
            storage.bytes = storage.bytes.new_empty(0)  # the last reference
        self._was_freed = True

    def reload(self) -> None:
        """Allocate device memory, and start to copy the activations back. Later calls do nothing."""
        if self._was_reloaded:
            return
        self._was_reloaded = True
        self.free_device_memory()
        transfers = self._offloads.transfers
        for storage, memory in zip(self._storages, self._host, strict=True):
            storage.bytes = torch.empty(memory.numel(), dtype=torch.uint8, device=storage.bytes.device)
        copies = [(storage.bytes, memory) for storage, memory in zip(self._storages, self._host, strict=True)]
        # The allocator may hand out memory that computation still uses.
        self._arrived = transfers.copy_to_device(copies, [transfers.mark_computation(), self._left])
        for storage in self._storages:
            storage.point_views_to(storage.bytes)

    def wait_for_reload(self) -> None:
        """Let later kernels wait for the reloaded activations, and give the host memory back to the pool."""
        self._offloads.transfers.make_computation_wait(self._arrived)
        for memory in self._host:
            self._offloads.return_host_memory(memory, self._arrived)
        self._host, self._storages = [], []
