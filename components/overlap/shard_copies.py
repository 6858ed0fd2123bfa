"""
FSDP shards copied from other GPUs' memory, instead of gathered by collectives.

Before a step's passes, ranks publish their slices in memory that the host's other ranks can read; their own memory may
change while slower ranks still read. A rank copies slices when it needs them, and no other rank takes part: a GPU's
copy engines do this without its multiprocessors, which a collective would share with products.
"""

from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from itertools import chain, islice
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drawloom import NodeView, Problem, component, internal
from drawloom.components.overlap.shifts import ALIGNMENT, CopyStream
from drawloom.components.parallel.fsdp import count_largest_unit
from drawloom.components.parallel.shard_unit import ShardUnit, StartedGather, choose_gradient_message_dtype
from drawloom.ports import (
    Group,
    MemoryKind,
    Mesh,
    Precision,
    StageFeature,
    StageNodes,
    WrappingOrder,
)


@component(impact="safe")
class CopiedShards(StageFeature):
    """
    FSDP shards that ranks copy from other GPUs' memory on one host.

    Copies do not slow products down as much as collectives do. Another copy of every rank's slices takes memory.
    """

    order: ClassVar[WrappingOrder] = WrappingOrder.PLACEMENT
    keeps_layer_shapes: ClassVar[bool] = True

    mesh: Mesh
    precision: Precision
    published: "list[PublishedSlices]" = internal(factory=list)
    _bytes: int = internal(0)

    @classmethod
    def check_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[Problem]:
        """Yield problems for a mesh without shards, and for a run that survives losses."""
        sizes = nodes.mesh.settings["data_shard"], nodes.sizes.context
        if sizes == (1, 1):
            hint = f"remove [{feature.name}], or write data_shard = 2 in [{nodes.mesh.name}]"
            yield feature.problem("use", "there are no shards along data_shard and context", hint)
        yield from nodes.check_run_ends_with_losses(
            feature, "kernels that wait for other GPUs' memory do not end when a rank is lost"
        )

    @classmethod
    def describe_stages(cls, feature: NodeView, nodes: StageNodes) -> Iterator[str]:
        yield "ranks copy shards from other GPUs' memory"

    def change_shards(self, shards: Sequence[Any]) -> None:
        """Publish all units' slices, and let units copy other ranks'."""
        names = ("expert_shard",) if self.mesh.sizes.expert > 1 else ()
        groups: list[Any] = [self.mesh.shard_group, *map(self.mesh.group, names)]
        all_units = [unit for module in shards for unit in module.units if unit.parameters]
        for group in groups:
            if not (units := [unit for unit in all_units if unit.groups.shards == group.handle]):
                continue
            self.published.append(slices := PublishedSlices(group, units))
            self._bytes += slices.memory.parts[0].nbytes
            if trained := [unit for unit in units if unit.trained and unit.dtypes.message.itemsize == 2]:
                self._bytes += SharedParts(group, trained).memory.parts[0].nbytes

    def place_on_meta(self, modules: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> None:
        """Count the bytes of published slices, and of a unit's gradients for other ranks if they travel in 16 bits."""
        ranks = self.mesh.shard_group.size
        message = choose_gradient_message_dtype(self.precision, replicas=self.mesh.sizes.data_replicate > 1)
        for module in modules:
            inside = set(module.modules())
            published = sum(parameter.numel() for parameter in module.parameters()) // ranks
            unit = count_largest_unit(module, [block for block in blocks if block in inside])
            sent = unit * (ranks - 1) // ranks * message.itemsize if message.itemsize == 2 else 0
            self._bytes += published * self.precision.compute.itemsize + sent

    def change_device_bytes(self, sizes: MutableMapping[MemoryKind, int]) -> None:
        sizes["compute_copies"] += self._bytes

    def before_passes(self, only_if_changed: bool = False) -> None:
        """Publish slices that may have changed."""
        for slices in self.published:
            slices.publish(only_if_changed)

    def after_backward(self) -> None:
        """Expect trained slices to change, for which a fused optimizer sets no version numbers."""
        for slices in self.published:
            slices.forget_trained()


class PublishedSlices:
    """Slices of some units in memory shared by a group's ranks; frozen ones are published again only after a change."""

    def __init__(self, group: Group, units: Sequence[ShardUnit]) -> None:
        self.group, self.units = group, units
        packed = {unit: unit.pack_slices() for unit in units}
        self.memory = group.allocate_symmetric_memory(_count_bytes(chain.from_iterable(packed.values())))
        by_rank = [_view_slots(part, chain.from_iterable(packed.values())) for part in self.memory.parts]
        self._slots = {unit: [list(islice(slots, len(packed[unit]))) for slots in by_rank] for unit in units}
        self._versions: dict[ShardUnit, list[int]] = {}
        self._stream = CopyStream(group.device)
        for unit in units:
            unit.gather_slices = self.start_copies

    def publish(self, only_if_changed: bool) -> None:
        """Copy slices to the shared memory; with `only_if_changed`, only those that may have changed."""
        if not only_if_changed:
            self.forget_trained()
        stale = [unit for unit in self.units if self._versions.get(unit) != _list_versions(unit)]
        if stale:
            self.memory.barrier()  # no rank reads old slices any more
            for unit in stale:
                torch._foreach_copy_(self._slots[unit][self.group.rank], [*unit.pack_slices()])
                self._versions[unit] = _list_versions(unit)
            self.memory.barrier()

    def start_copies(self, unit: ShardUnit) -> StartedGather:
        """Start to copy all ranks' slices of a unit; on a GPU, after earlier work in this stream."""
        slots = self._slots[unit]
        messages, unpack = unit.open_messages(slots[self.group.rank])

        def copy() -> None:
            for distance in range(self.group.size):
                rank = (self.group.rank + distance) % self.group.size
                for message, slot in zip(messages, slots[rank], strict=True):
                    message[rank].copy_(slot)

        return StartedGather(self._stream.start(copy), (), unpack)

    def forget_trained(self) -> None:
        """Publish trained slices the next time, even if their version numbers are the same."""
        for unit in self.units:
            if unit.trained:
                self._versions.pop(unit, None)


class SharedParts:
    """Gradients that ranks copy from one another, one unit's at a time."""

    def __init__(self, group: Group, units: Sequence[ShardUnit]) -> None:
        self.group = group
        self.memory = group.allocate_symmetric_memory(max(map(_count_sent_bytes, units)))
        self._stream = CopyStream(group.device)
        for unit in units:
            unit.exchange_parts = self.exchange

    def exchange(self, tensors: Sequence[Tensor], _group: Any) -> tuple[Sequence[Tensor], Sequence[Any]]:
        """Start to copy the other ranks' parts for this rank; see `ExchangeParts`."""
        own = self.group.rank
        received = [parts.new_empty(len(parts) - 1, parts.shape[1]) for parts in tensors]
        slots = [[*_view_slots(part, received)] for part in self.memory.parts]

        def publish_and_copy_parts() -> None:
            self.memory.barrier()  # no rank reads the last unit's parts any more
            # A rank's slots have a part for every other rank, in order.
            for parts, slot in zip(tensors, slots[own], strict=True):
                slot[:own].copy_(parts[:own])
                slot[own:].copy_(parts[own + 1 :])
            self.memory.barrier()
            for peer in range(self.group.size):
                if peer != own:
                    for rows, slot in zip(received, slots[peer], strict=True):
                        rows[_index_without(peer, own)].copy_(slot[_index_without(own, peer)])

        return received, [self._stream.start(publish_and_copy_parts)]


def _index_without(rank: int, left_out: int) -> int:
    """Return a rank's index among all ranks but `left_out`."""
    return rank - (rank > left_out)


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory with a place for every tensor."""
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def _view_slots(memory: Tensor, tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield places in memory (bytes,) with the tensors' shapes and dtypes, one behind the other."""
    begin = 0
    for tensor in tensors:
        yield memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        begin += _count_bytes([tensor])


def _count_sent_bytes(unit: ShardUnit) -> int:
    """Return the bytes of a unit's gradients for other ranks."""
    ranks = unit.groups.shards.size()
    sizes = [parameter.message.numel() // ranks * (ranks - 1) for parameter in unit.trained]
    return sum(-(-size * unit.dtypes.message.itemsize // ALIGNMENT) * ALIGNMENT for size in sizes)


def _list_versions(unit: ShardUnit) -> list[int]:
    return [parameter.master._version for parameter in unit.parameters]
