"""A pipeline rank of a plan: its stages on the meta device, what it holds, and what it exchanges."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs
import torch

from drawloom.components.distributed.device_model import DeviceModel
from drawloom.components.distributed.mesh_layout import SHARDS
from drawloom.components.distributed.planned import PlannedMesh
from drawloom.components.parallel.shard_transfers import sent_dtype
from drawloom.components.parallel.sliced_store import SlicedStore, largest_unit
from drawloom.components.planning.stage_costs import StageCosts
from drawloom.components.planning.step_time import ReplicaTimes
from drawloom.components.ports.stages import Stage


@attrs.frozen
class Elements:
    """
    Of a stage, how many elements its parameters have, and those of them that are trained.

    `kept` are the latter's that this rank has, and `unit` those of the largest unit that is reduced by itself.
    """

    all: int
    trained: int
    kept: int
    unit: int


@attrs.frozen(eq=False)
class RankView:
    """
    The stages of one pipeline rank, an outline without memory, and what it holds of parameters and moments.

    `update_flops` are the operations of matrix products in an update of its weights.
    """

    mesh: PlannedMesh
    stages: Any
    kept: Mapping[str, int]
    update_flops: float

    @property
    def sliced(self) -> SlicedStore | None:
        """The store of sharded parameters, if they are."""
        store = self.stages.store
        return store if isinstance(store, SlicedStore) else None

    @cached_property
    def trained(self) -> int:
        """Elements of the trained parameters that the optimizer keeps on this rank."""
        return sum(parameter.numel() for _, parameter in self.stages.named())

    @cached_property
    def frozen(self) -> set[str]:
        """The names of the parameters that are not trained."""
        named = (each for stage in self.stages.local for each in stage.named_parameters())
        return {name for name, parameter in named if not parameter.requires_grad}

    @cached_property
    def elements(self) -> dict[int, Elements]:
        """By stage."""
        kept = dict(self.stages.named())
        return {stage.index: self._elements(stage, kept) for stage in self.stages.local}

    def _elements(self, stage: Stage, kept: Mapping[str, torch.Tensor]) -> Elements:
        parameters = list(stage.module.parameters())
        return Elements(
            all=sum(each.numel() for each in parameters),
            trained=sum(each.numel() for each in parameters if each.requires_grad),
            kept=sum(kept[name].numel() for name, _ in stage.named_parameters() if name in kept),
            unit=largest_unit(stage.module, self.stages.model.blocks(stage.module)),
        )

    def gradient_bytes(self, stage: Stage, microbatches: int) -> int:
        """
        Bytes of the gradients of a stage while its backward passes go on.

        Those of sharded parameters are whole until they are reduced, which is once a step, or unit by unit.
        """
        size, elements = int(self.stages.precision.gradient.itemsize), self.elements[stage.index]
        if self.sliced is None:
            return elements.kept * size
        by_unit = microbatches == 1 or bool(self.stages.sync_each_microbatch)
        return (elements.kept + 2 * elements.unit if by_unit else elements.trained) * size

    def summed_bytes(self) -> int:
        """Bytes that sums over ranks take besides the gradients."""
        # Each bucket is a copy that lives until all sums are written back.
        buckets = self.trained * self._wide
        if self.sliced is not None:
            # Gradients of a unit are sent from where they are; those that others send take as much again.
            units = (each.unit for each in self.elements.values())
            return self._sent * max(units) + buckets * (self.mesh.sizes.data_replicate > 1)
        return buckets if self.mesh.data_group.size > 1 else 0

    @property
    def _wide(self) -> int:
        """Bytes of a number in sums over ranks."""
        return torch.promote_types(self.stages.precision.gradient, self.stages.precision.reduce).itemsize

    @property
    def _sent(self) -> int:
        """Bytes of a gradient that travels to the rank that has its slice."""
        return sent_dtype(self.stages.precision, self.mesh.sizes.data_replicate > 1).itemsize

    def buffers(self, costs: Mapping[int, StageCosts], device: DeviceModel, batches: int) -> dict[str, int]:
        """Bytes of batches, of messages on their way, and of the device's libraries."""
        sends = self.mesh.sizes.pipeline > 1
        messages = 2 * max(each.sent for each in costs.values()) if sends else 0
        found = {"batches": batches, "messages": messages, "libraries": device.workspace}
        return {name: size for name, size in found.items() if size}

    def exchange(self, device: DeviceModel) -> ReplicaTimes:
        """Seconds in which parameters are gathered and gradients summed, and weights changed."""
        gathers = {} if self.sliced is None else self._gather_seconds(self.sliced, device)
        by_block = self.sliced is not None and self.sliced.by_block
        reduces = self._reduce_seconds(device)
        often = self.stages.sync_each_microbatch
        replicas = 2 * self.trained * self._wide * self._seconds_per_byte(device, "data_replicate")
        return ReplicaTimes(
            by_pass=gathers if by_block else {},
            summed_by_pass=reduces if often else {},
            once=0.0 if by_block else sum(gathers.values()),
            reduced=replicas + (0.0 if often else sum(reduces.values())),
            update=self._update_seconds(device),
        )

    def _gather_seconds(self, sliced: SlicedStore, device: DeviceModel) -> dict[int, float]:
        """By stage, how long it takes to gather its parameters."""
        seconds = self._seconds_per_byte(device, *SHARDS)
        stages = zip(self.stages.local, sliced.gathered, strict=True)
        return {stage.index: (each.root + sum(each.blocks)) * seconds for stage, each in stages}

    def _reduce_seconds(self, device: DeviceModel) -> dict[int, float]:
        """By stage, how long it takes to reduce the gradients of sharded parameters."""
        if self.sliced is None:
            return {}
        seconds = self._sent * self._seconds_per_byte(device, *SHARDS)
        return {stage: each.all * seconds for stage, each in self.elements.items()}

    def _seconds_per_byte(self, device: DeviceModel, *dimensions: str) -> float:
        """Seconds for a byte of a tensor that all ranks along dimensions gather, or sum by parts."""
        size = self.mesh.group(*dimensions).size
        return (size - 1) / size / link(self.mesh, device, *dimensions)

    @cached_property
    def _weights(self) -> int:
        """Bytes of what the optimizer changes."""
        return sum(each.nbytes for _, each in self.stages.named())

    def _update_seconds(self, device: DeviceModel) -> float:
        """The norm and scaling of gradients, the update of weights and moments, and casts of weights."""
        traffic: float = 4 * self.kept.get("gradients", 0) + 2 * self._weights + 2 * self.kept.get("optimizer_state", 0)
        traffic += self.kept.get("masters", 0) + self.kept.get("compute_copies", 0)
        products = self.update_flops / device.product_rate(torch.bfloat16)
        return traffic / (device.bandwidth * device.reached.memory) + products


def link(mesh: PlannedMesh, device: DeviceModel, *dimensions: str) -> float:
    """Bytes/s that a rank sends to those that differ from it along dimensions of the mesh."""
    ranks = mesh.group(*dimensions).ranks
    hosts = {rank // device.per_host for rank in ranks}
    # Between hosts, all ranks of a group on a host share the work of its network cards.
    bandwidth = device.link if len(hosts) == 1 else min(device.link, device.network * len(ranks) / len(hosts))
    return bandwidth * device.reached.messages
