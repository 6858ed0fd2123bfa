"""Builds the stages that this rank owns, and gives their parameters memory and values."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import nn

from drawloom.components.distributed.rank_errors import run_on_all
from drawloom.components.parallel.buckets import BUCKET_BYTES
from drawloom.components.parallel.data_parallel import DataParallel
from drawloom.components.parallel.data_shard import ShardedStore, gathers_by_block
from drawloom.components.parallel.dimension import Dimension
from drawloom.components.parallel.dimensions import DIMENSIONS
from drawloom.components.parallel.expert import NO_DISPATCHER, WRITE_DISPATCHER
from drawloom.components.parallel.master_weights import ParameterStore
from drawloom.components.ports.adapters import Adapter
from drawloom.components.ports.distributed import Device, Mesh, Precision
from drawloom.components.ports.experts import Dispatcher, supports_expert_parallel
from drawloom.components.ports.memory import MemoryKind
from drawloom.components.ports.model import BatchContext, Model, layers_keep_shapes
from drawloom.components.ports.pipeline import Loss, Schedule
from drawloom.components.ports.run import RunInfo
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.stages import Recompute, Stage, Transform
from drawloom.components.stages.activation_specs import ActivationSpecs
from drawloom.components.stages.build import ParallelModules, StageBuilder, tie
from drawloom.components.stages.checks import (
    costs_of_ends,
    fault_of_policy,
    layers_of_stages,
    losses_that_are_modules,
    misfits_of_capture,
    notes_of_policy,
    policies_of_schedule,
    roundings,
    stage_nodes,
)
from drawloom.components.stages.compilation import compile_blocks, idle_policies, undivided_backwards
from drawloom.components.stages.initial_values import InitialValues, check_capacity
from drawloom.components.stages.parameters import StageParameters
from drawloom.components.storage.safetensors.reader import open_safetensors_folder
from drawloom.graph import Problem, UserError, above, at_least, component, setting
from drawloom.graph.wiring.node import NodeView
from drawloom.kernels.recompute_policy import make_recomputable

FROZEN = "frozen"
"""The entry of a state with the fingerprint of the weights that it leaves out; parameters' names have dots."""


@component
class MaterializedStages:
    """
    This rank's stages: built on the meta device, adapted and transformed, materialised, then initialised or loaded.

    With `adapters` the model is frozen but for what these train. A checkpoint holds what is trained; the rest is made
    again from the same folder or seed, of which it holds a fingerprint.
    """

    model: Model
    loss: Loss
    schedule: Schedule
    mesh: Mesh
    device: Device
    precision: Precision
    job: RunInfo
    adapters: list[Adapter] = attrs.field(factory=list)
    transforms: list[Transform] = attrs.field(factory=list)
    dispatcher: Dispatcher | None = None
    embedding_layer_cost: int = setting(
        default=0,
        check=at_least(0),
        impact="safe",
        doc="cost of the embedding in layers, of which the first stage holds fewer",
    )
    head_layer_cost: int = setting(
        default=0,
        check=at_least(0),
        impact="safe",
        doc="cost of the head in layers, of which the last stage holds fewer",
    )
    reshard_after_forward: bool | None = setting(
        default=None,
        impact="safe",
        doc="whether sharded parameters of a layer are freed after its forward and gathered again in its backward, "
        "which takes less memory and more time; if left out, with one pipeline rank",
    )
    sync_each_microbatch: bool = setting(
        default=False,
        impact="safe",
        doc="whether ranks of `mesh.data_shard` reduce gradients after each microbatch, so that none keeps those of "
        "whole parameters until the last one, which takes less memory and more messages",
    )
    bucket_bytes: int = setting(
        default=BUCKET_BYTES,
        impact="safe",
        check=above(0),
        doc="bytes of gradients that replicas sum in one collective, while the backward pass computes others",
    )
    recompute: Recompute = setting(
        default="none",
        impact="safe",
        check=fault_of_policy,
        doc="what the backward pass computes again instead of keeping it: 'none'; 'selective': norms, gates and "
        "rotations of the kernels; 'blocks': every block; a number n: one of n blocks",
    )
    compile: bool = setting(
        default=False,
        doc="whether each block is compiled by torch.compile; its weights' gradients can't be put off then",
    )
    capture: bool = setting(
        default=False,
        impact="safe",
        doc="whether a GPU gets the passes of a stage as CUDA graphs, which is faster where microbatches are small",
    )
    weights: Path | None = setting(
        default=None, doc="a Hugging Face folder to start from; that of `model.auto`, or random weights, if left out"
    )
    _values: InitialValues = attrs.field(init=False, default=None)
    local: list[Stage] = attrs.field(init=False, factory=list)  # this rank's stages, in order
    store: ParameterStore | ShardedStore = attrs.field(init=False, default=None)  # what holds the parameters
    _activations: ActivationSpecs = attrs.field(init=False, default=None)
    _parameters: StageParameters = attrs.field(init=False, default=None)
    _fingerprint: str = attrs.field(init=False, default="")

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield what does not fit together: see checks.py, compilation.py, and each mesh dimension's `check`."""
        if nodes := stage_nodes(node):
            for dimension in DIMENSIONS:
                yield from dimension.check(nodes)
            if schedule := node.neighbour("schedule"):
                yield from undivided_backwards(node, schedule, nodes.mesh)
                yield from policies_of_schedule(node, schedule, nodes.mesh)
            yield from misfits_of_capture(nodes)
        yield from roundings(node)
        if loss := node.neighbour("loss"):
            yield from losses_that_are_modules(node, loss)
        if schedule := node.neighbour("schedule"):
            yield from costs_of_ends(node, schedule)
        yield from idle_policies(node)

    @classmethod
    def notes(cls, node: NodeView) -> Iterator[str]:
        """Yield how the ranks of the mesh share the parameters, and what is recomputed."""
        yield from notes_of_policy(node.settings["recompute"])
        if node.settings["capture"]:
            yield "capture: from the second step on a GPU gets each pass of a stage as a CUDA graph; a CPU has none"
        if nodes := stage_nodes(node):
            for dimension in DIMENSIONS:
                yield from dimension.notes(nodes)
            schedule = node.neighbour("schedule")
            if schedule and nodes.model:
                yield from layers_of_stages(schedule, nodes.mesh, nodes.model)

    def check_machine(self) -> None:
        """Raise UserError if `weights` is not a folder of readable safetensors files."""
        if self.weights is not None:
            try:
                open_safetensors_folder(self.weights)
            except UserError as error:
                raise UserError(f"weights: {error}") from error

    def open(self) -> None:
        """Build, parallelize and materialize this rank's stages, with initial or loaded values."""
        if self.mesh.sizes.expert > 1 and not supports_expert_parallel(self.dispatcher):
            raise UserError(f"{NO_DISPATCHER}; {WRITE_DISPATCHER}", exit_code=2)
        parallel = self._parallelize()
        self._activations = ActivationSpecs(
            parallel.spans, self._builder.build_for_activations, self._layers_keep_shapes
        )
        self._adopt(parallel, self._materialize(parallel))
        for module in parallel.modules.values():
            if self.compile:
                compile_blocks(self.model.blocks(module))
            make_recomputable(self.model.blocks(module))
        self._parameters.open()
        self._fingerprint = self._values.origin(self._parameters.all().values())
        self._check_patterns()

    def outline(self) -> None:
        """Build and parallelize this rank's stages without memory and values, for plans."""
        parallel = self._parallelize()
        modules = [*parallel.modules.values()]
        tie(modules)
        self._adopt(parallel, self._data_parallel(parallel).planned_store(modules))

    @cached_property
    def _dimensions(self) -> list[Dimension]:
        return [dimension(self.mesh) for dimension in DIMENSIONS]

    @cached_property
    def _builder(self) -> StageBuilder:
        return StageBuilder(
            model=self.model,
            loss=self.loss,
            schedule=self.schedule,
            mesh=self.mesh,
            precision=self.precision,
            adapters=self.adapters,
            transforms=self.transforms,
            dispatcher=self.dispatcher,
            dimensions=self._dimensions,
            embedding_layer_cost=self.embedding_layer_cost,
            head_layer_cost=self.head_layer_cost,
        )

    def _parallelize(self) -> ParallelModules:
        """Build this rank's modules on the meta device, split over ranks."""
        return self._builder.build_local()

    def _data_parallel(self, parallel: ParallelModules) -> DataParallel:
        return DataParallel(
            mesh=self.mesh,
            precision=self.precision,
            blocks=self.model.blocks,
            by_block=gathers_by_block(self.reshard_after_forward, self.mesh.sizes.pipeline),
            by_microbatch=self.sync_each_microbatch,
            bucket_bytes=self.bucket_bytes,
            # Hooks, by which replicas begin to sum before a backward pass ends, are not part of a CUDA graph.
            overlaps=not self.capture,
            experts=parallel.experts,
        )

    def _materialize(self, parallel: ParallelModules) -> ParameterStore | ShardedStore:
        """Shard modules, give them memory and values, and return the store of their parameters."""
        modules = [*parallel.modules.values()]
        check_capacity(modules, self.mesh.shard_group.size, self.device.device)
        data_parallel = self._data_parallel(parallel)
        sharded = data_parallel.shard(modules)
        slices = {name: part.place for name, part in parallel.splits.items()}
        self._values = InitialValues(self.model, self.job.seed, self.device.device, self.weights, slices)
        run_on_all(self.mesh.world, lambda: self._values.fill(modules))
        if self.adapters:
            self._values.fill_adapters(modules)
        tie(modules)
        return data_parallel.store(modules, sharded)

    def _adopt(self, parallel: ParallelModules, store: ParameterStore | ShardedStore) -> None:
        """Make modules, whose parameters the store holds, this rank's stages."""
        self.store = store
        self.local = [
            Stage(
                index=index,
                count=len(parallel.spans),
                span=parallel.spans[index],
                module=module,
                masters=store.masters,
                shards=store.shards_of(module),
                adapters=self.adapters,
                splits=parallel.splits,
                recompute=self.recompute,
                capture=self.capture,
            )
            for index, module in parallel.modules.items()
        ]
        self._parameters = StageParameters(
            stages=self.local,
            store=store,
            dimensions=self._dimensions,
            precision=self.precision,
            device=self.device.device,
            bucket_bytes=self.bucket_bytes,
            splits=parallel.splits,
            experts=parallel.experts,
        )

    @property
    def _layers_keep_shapes(self) -> bool:
        """Whether every layer gives what it takes: the model says so, and nothing here makes layers different."""
        changed = bool(self.transforms or self.precision.uncast)
        return not changed and layers_keep_shapes(self.model)

    def boundary(self, stage: int, inputs: Any, shared: BatchContext) -> Any:
        """What a stage takes for a microbatch with these inputs: a tree of tensors on the meta device."""
        return self._activations.of(stage, inputs, shared)

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """The trained parameters of all local stages, each once; none while these are not open."""
        return [] if self._parameters is None else self._parameters.named()

    def slices(self) -> dict[str, TensorSlice | None]:
        """Of each trained parameter, the slice that this rank has; None for a whole one."""
        return {name: self._parameters.slice(name) for name, _ in self.named()}

    def counted(self) -> list[tuple[str, nn.Parameter]]:
        """Those of `named` that no earlier rank holds, of those that are no replicas of this one."""
        return self._parameters.counted()

    def cast_weights(self, only_if_changed: bool = False) -> None:
        """Cast parameters to what layers compute with."""
        self.store.cast(only_if_changed)

    def hand_over_gradients(self) -> None:
        """Give the gradients of a step's microbatches to the parameters that the optimizer keeps."""
        self.store.hand_over_gradients()

    def memory_bytes(self) -> dict[MemoryKind, int]:
        """Bytes of parameters, buffers, masters and compute copies, and of the gradients that a step will have."""
        return self._parameters.memory_bytes() if self._parameters is not None else {}

    def sum_gradients(self) -> None:
        """Sum the gradients that backward passes have not summed; a pipeline rank without a parameter adds zeros."""
        self._parameters.sum_gradients()

    def state_slices(self) -> dict[str, TensorSlice | None]:
        """The trained parameters and persistent buffers that this rank holds, and of which it holds a slice."""
        return {name: self._parameters.slice(name) for name in self.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Every trained parameter and every persistent buffer by its name; a fingerprint of what is frozen."""
        state: dict[str, Any] = {
            name: tensor.detach() for held in self._parameters.changing() for name, tensor in held.items()
        }
        return state | ({FROZEN: self._fingerprint} if self._fingerprint else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy saved tensors into place."""
        if other := self.state_slices().keys() ^ state.keys():
            raise KeyError(f"parameters differ: {sorted(other)}")
        if state.get(FROZEN) != (self._fingerprint or None):
            raise UserError(self._values.other_origin())
        with torch.no_grad():
            # By stage, because two stages of this rank may each hold a buffer of one name.
            for held in self._parameters.changing():
                for name, tensor in held.items():
                    tensor.copy_(state[name])

    def _check_patterns(self) -> None:
        """UserError for a pattern of `precision.uncast` that is the name of no parameter on any rank."""
        patterns = self.precision.uncast
        names = [name for stage in self.local for name, _ in stage.module.named_parameters()]
        found = [pattern for pattern in patterns if any(fnmatchcase(name, pattern) for name in names)]
        everywhere = {pattern for each in self.mesh.pipeline_group.gather_json(found) for pattern in each}
        if unknown := [pattern for pattern in patterns if pattern not in everywhere]:
            raise UserError(
                f"precision.uncast: no parameter is called {unknown[0]!r}; one is {names[0]!r}", exit_code=2
            )
