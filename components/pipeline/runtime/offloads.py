"""Activations that wait in host memory between a microbatch's forward and backward pass."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import partial
from weakref import ref

import attrs
import torch
from torch import Tensor

from drawloom import internal
from drawloom.kernels.recompute.saved_tensors import Collecting, KeptTensor
from drawloom.ports import OPS, Action, Operation, PassFeature, PassRun, Ticket, Transfers, is_dtensor


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


@attrs.define(eq=False)
class ActivationMoves:
    """Activations leaving the device between one run's passes, for the stages in `offloaded`."""

    run: PassRun
    offloads: Offloads
    offloaded: Set[int]
    _kept: dict[tuple[int, int], Sequence[ref[KeptTensor]]] = internal(factory=dict)
    _moved: dict[tuple[int, int], OffloadedTensors] = internal(factory=dict)
    # activations on their way to the host since before the last compute action, and since then
    _leaving: list[OffloadedTensors] = internal(factory=list)
    _started: list[OffloadedTensors] = internal(factory=list)

    def compute(self, operation: Operation, action: Action) -> None:
        """
        Run a compute action; first free the device memory of activations whose offload began before the last action.

        Their copies to the host have overlapped with that action, and computation hardly waits for them.
        """
        for tensors in self._leaving:
            tensors.free_device_memory()
        self._leaving, self._started = self._started, []
        key = action.stage, action.microbatch
        if action.op == "F" and action.stage in self.offloaded:
            with Collecting() as collecting:
                operation(action)
            self._kept[key] = collecting.kept  # what autograd saved, for `offload`
            return
        if (moved := self._moved.pop(key, None)) is not None:
            moved.wait_for_reload()
        operation(action)

    def offload(self, action: Action) -> None:
        """Start to copy a microbatch's activations to host memory."""
        key, runnable = (action.stage, action.microbatch), self.run.stages[action.stage]
        # The memory of inputs, outputs and parameters stays, whoever saved it.
        parameters = (parameter for parameter in runnable.stage.module.parameters() if not is_dtensor(parameter))
        others = (*runnable.list_inputs_and_outputs(action.microbatch), *parameters)
        self._moved[key] = self.offloads.start_offload(self._kept.pop(key), others)
        self._started.append(self._moved[key])

    def reload(self, action: Action) -> None:
        """Start to copy a microbatch's activations back."""
        self._moved[action.stage, action.microbatch].reload()


@attrs.frozen(eq=False)
class Offloading(PassFeature):
    """Feature for programs with actions OFFLOAD and RELOAD, for the stages in `offloaded`."""

    offloads: Offloads
    offloaded: Set[int]

    def start_run(self, run: PassRun, operations: Mapping[str, Operation]) -> Mapping[str, Operation]:
        """Return operations with moves of activations."""
        moves = ActivationMoves(run, self.offloads, self.offloaded)
        computing: dict[str, Operation] = {op: partial(moves.compute, operations[op]) for op in OPS}
        return {**operations, **computing, "OFFLOAD": moves.offload, "RELOAD": moves.reload}
