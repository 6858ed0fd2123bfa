"""Pipeline rank in a plan: its stages on the meta device, its memory, and its exchanges with replicas."""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import attrs
import torch

from drawloom.components.distributed.device_model import DeviceModel
from drawloom.components.distributed.mesh_layout import SHARDS
from drawloom.components.distributed.planned import PlannedMesh
from drawloom.components.parallel.fsdp import SlicedStore, count_largest_unit
from drawloom.components.parallel.shard_unit import choose_gradient_message_dtype
from drawloom.components.planning.stage_costs import StageCosts, Work
from drawloom.components.planning.step_time import ReplicaTimes
from drawloom.ports import FrozenModel, LinearLayer, Stage


@attrs.frozen
class ElementCounts:
    """
    Element counts of a stage's parameters: all, and the trained ones.

    `owned` counts this rank's trained elements, `whole` those without shards, and `unit` the elements in the largest
    reduction unit.
    """

    all: int
    trained: int
    owned: int
    whole: int
    unit: int


GRADIENT_PASSES = 2
"""Norm and scaling read and write all gradients, and clipping by a factor of 1 reads none; the update reads them once
more."""


@attrs.frozen(eq=False)
class RankView:
    """
    Pipeline rank in a plan: stages on the meta device, and bytes by kind (parameters, gradients, optimizer state).

    `host_bytes` are streamed from host memory and back in every step; `count_bytes_on_host` returns both for
    a fraction of the optimizer's state in host memory. `update_flops` are the matrix product FLOPs in one optimizer
    step, and `update_arithmetic` the other operations of optimizers limited by them. `contention` is as in
    `ReplicaTimes`, and `frozen_model` is the recipe's frozen second model, if it has one.
    """

    mesh: PlannedMesh
    stages: Any
    bytes_by_kind: Mapping[str, int]
    host_bytes: int
    count_bytes_on_host: Callable[[float], tuple[Mapping[str, int], int]]
    update_flops: float
    update_arithmetic: float
    contention: float
    frozen_model: FrozenModel | None = None

    def with_state_on_host(self, host_fraction: float) -> "RankView":
        """Return this rank with a fraction of the optimizer's state in host memory."""
        bytes_by_kind, host_bytes = self.count_bytes_on_host(host_fraction)
        return attrs.evolve(self, bytes_by_kind=bytes_by_kind, host_bytes=host_bytes)

    @property
    def sharded_parameter_store(self) -> SlicedStore | None:
        """Return the sharded parameters' store, or None if parameters are not sharded."""
        store = self.stages.store
        return store if isinstance(store, SlicedStore) else None

    @cached_property
    def trainable_elements_on_rank(self) -> int:
        """Count the trained elements owned by this rank."""
        return sum(parameter.numel() for _, parameter in self.stages.named_parameters())

    @cached_property
    def frozen_names(self) -> set[str]:
        """Return the names of untrained parameters."""
        named = (pair for stage in self.stages.local for pair in stage.named_masters_or_parameters())
        return {name for name, parameter in named if not parameter.requires_grad}

    @cached_property
    def elements_by_stage(self) -> dict[int, ElementCounts]:
        """Return the element counts by stage."""
        owned = dict(self.stages.named_parameters())
        return {stage.index: self._count_elements(stage, owned) for stage in self.stages.local}

    def _count_elements(self, stage: Stage, owned: Mapping[str, torch.Tensor]) -> ElementCounts:
        """Count a stage's elements: all, trained, owned by this rank, without shards, and in the largest unit."""
        parameters = list(stage.module.parameters())
        sizes = {name: owned[name].numel() for name, _ in stage.named_masters_or_parameters() if name in owned}
        shards = self.sharded_parameter_store.slices if self.sharded_parameter_store else {}
        return ElementCounts(
            all=sum(parameter.numel() for parameter in parameters),
            trained=sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            owned=sum(sizes.values()),
            whole=sum(size for name, size in sizes.items() if name not in shards),
            unit=count_largest_unit(stage.module, self.stages.model.blocks(stage.module)),
        )

    def gradient_bytes_in_backward(self, stage: Stage, microbatches: int) -> int:
        """
        Return a stage's gradient bytes during its backward passes.

        Sharded parameters' gradients are whole until they are reduced: once a step, or unit by unit.
        """
        size, elements = int(self.stages.precision.gradient.itemsize), self.elements_by_stage[stage.index]
        if self.sharded_parameter_store is None:
            return elements.owned * size
        by_unit = microbatches == 1 or bool(self.stages.sync_each_microbatch)
        return (elements.owned + 2 * elements.unit if by_unit else elements.trained) * size

    @property
    def whole_gradient_bytes_by_stage(self) -> dict[int, int]:
        """The gradient bytes for parameters without shards, whose addresses are fixed in CUDA graphs."""
        size = int(self.stages.precision.gradient.itemsize)
        return {stage: elements.whole * size for stage, elements in self.elements_by_stage.items()}

    def reduction_buffer_bytes(self) -> int:
        """Return the bytes for the reduction over ranks, beyond the gradients."""
        # Every bucket is a copy that lives until all sums are written back.
        buckets = self.trainable_elements_on_rank * self._reduction_itemsize
        if self.sharded_parameter_store is not None:
            # A unit's gradients are sent without a copy; the gradients received from other ranks take as much again.
            units = (elements.unit for elements in self.elements_by_stage.values())
            return self._gradient_message_itemsize * max(units) + buckets * (self.mesh.sizes.data_replicate > 1)
        return buckets if self.mesh.data_group.size > 1 else 0

    @property
    def _reduction_itemsize(self) -> int:
        """Return an element's bytes in the reduction over replicas."""
        return torch.promote_types(self.stages.precision.gradient, self.stages.precision.reduce).itemsize

    @property
    def _gradient_message_itemsize(self) -> int:
        """Return a gradient element's bytes in the message to its owner."""
        return choose_gradient_message_dtype(self.stages.precision, self.mesh.sizes.data_replicate > 1).itemsize

    def buffer_bytes_by_kind(
        self, costs: Mapping[int, StageCosts], device: DeviceModel, batch_bytes: int
    ) -> dict[str, int]:
        """Return the bytes by buffer: batches, messages in flight, and the device's libraries."""
        sends = self.mesh.sizes.pipeline > 1
        messages = 2 * max(stage_costs.sent for stage_costs in costs.values()) if sends else 0
        sizes = {"batches": batch_bytes, "messages": messages, "libraries": device.workspace}
        return {name: size for name, size in sizes.items() if size}

    def estimate_sync_and_update_times(self, device: DeviceModel) -> ReplicaTimes:
        """Return the work for gathers, reductions and the update: in every pass, or once a step."""
        gathers = (
            {}
            if self.sharded_parameter_store is None
            else self._estimate_gathers_by_stage(self.sharded_parameter_store, device)
        )
        gathers_per_block = self.sharded_parameter_store is not None and self.sharded_parameter_store.gathers_per_block
        reduces = self._estimate_reductions_by_stage(device)
        sync_each_microbatch = self.stages.sync_each_microbatch
        replicated = 2 * self.trainable_elements_on_rank * self._reduction_itemsize
        replicas = self._estimate_exchange(device, replicated, 1, "data_replicate")
        return ReplicaTimes(
            gathered_by_pass=gathers if gathers_per_block else {},
            reduced_by_pass=reduces if sync_each_microbatch else {},
            gathered_once=Work() if gathers_per_block else sum(gathers.values(), Work()),
            reduced_once=replicas if sync_each_microbatch else sum(reduces.values(), replicas),
            update=self._estimate_update(device),
            contention=self.contention,
        )

    def _estimate_gathers_by_stage(self, sliced: SlicedStore, device: DeviceModel) -> dict[int, Work]:
        """Return the work for gathering parameters, by stage."""
        return {
            stage.index: self._estimate_exchange(
                device,
                sizes.root + sum(sizes.blocks) - self._count_bytes_saved_by_encodings(stage),
                1 + len(sizes.blocks),
                *SHARDS,
            )
            for stage, sizes in zip(self.stages.local, sliced.gathered, strict=True)
        }

    def _count_bytes_saved_by_encodings(self, stage: Stage) -> int:
        """Count the bytes that encoded weights save in the messages with a stage's weights."""
        itemsize = int(self.stages.precision.compute.itemsize)
        return sum(
            layer.get_parameter(name).numel() * (itemsize - encoding.itemsize)
            for layer in stage.module.modules()
            if isinstance(layer, LinearLayer)
            for name, encoding in layer.gather_encodings.items()
        )

    def _estimate_reductions_by_stage(self, device: DeviceModel) -> dict[int, Work]:
        """Return the work for reducing sharded gradients, by stage."""
        if (sliced := self.sharded_parameter_store) is None:
            return {}
        work = dict[int, Work]()
        for stage, sizes in zip(self.stages.local, sliced.gathered, strict=True):
            parameters = [param for name, param in stage.module.named_parameters() if name in sliced.slices]
            sent = sum(param.numel() for param in parameters if param.requires_grad) * self._gradient_message_itemsize
            work[stage.index] = self._estimate_exchange(device, sent, 1 + len(sizes.blocks), *SHARDS)
        return work

    def _estimate_exchange(self, device: DeviceModel, size: float, messages: int, *dimensions: str) -> Work:
        """Return the work for all-gathers or reduce-scatters along mesh dimensions, in all `size` bytes."""
        group = self.mesh.group(*dimensions)
        link, sent = device.find_link(group.ranks), size * (group.size - 1) / group.size
        return Work(links=sent / link.bandwidth, planned=link.estimate_seconds(sent, messages)) if sent else Work()

    def _estimate_update(self, device: DeviceModel) -> Work:
        """Return an update's work, limited by memory, arithmetic or the host link."""
        sizes, reached = self.bytes_by_kind, device.reached
        state, gradients = self.host_bytes + sizes.get("optimizer_state", 0), sizes.get("gradients", 0)
        weights = sum(weight.nbytes for _, weight in self.stages.named_parameters())
        # Weights and state are read and written.
        traffic: float = gradients + 2 * (weights + state)
        traffic += sizes.get("masters", 0) + sizes.get("compute_copies", 0)
        norm_and_scaling = GRADIENT_PASSES * gradients
        arithmetic = self.update_arithmetic / device.peaks.get("float32", math.inf)
        matmuls = self.update_flops / device.get_matmul_peak(torch.bfloat16)
        # State in host memory is streamed in both directions at once, while the device updates.
        links = self.host_bytes / device.host_link

        def add_up(bandwidth: float, products: float) -> float:
            update = norm_and_scaling / bandwidth + max(traffic / bandwidth, arithmetic) + matmuls / products
            return max(update, links)

        return Work(
            flops=arithmetic + matmuls,
            memory=(norm_and_scaling + traffic) / device.bandwidth,
            links=links,
            floor=add_up(device.bandwidth, 1.0),
            planned=add_up(device.bandwidth * reached.memory, reached.products),
        )
