"""This rank's stages: their modules, their parameters' memory and values, and their state."""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from drawloom.components.distributed.rank_errors import run_and_gather_on_all_ranks
from drawloom.components.parallel.buckets import BUCKET_BYTES
from drawloom.components.parallel.data_parallel import DataParallel
from drawloom.components.parallel.data_shard import should_gather_per_block
from drawloom.components.parallel.dimension import Dimension
from drawloom.components.parallel.dimensions import DIMENSIONS
from drawloom.components.parallel.expert import NO_DISPATCHER, WRITE_DISPATCHER
from drawloom.components.parallel.master_weights import ParameterStore
from drawloom.components.ports.adapters import Adapter
from drawloom.components.ports.distributed import Device, Mesh, Precision
from drawloom.components.ports.experts import Dispatcher, supports_expert_parallel
from drawloom.components.ports.features import NamePatterns, StageFeature
from drawloom.components.ports.memory import MemoryKind
from drawloom.components.ports.memory_policy import MemoryPolicy
from drawloom.components.ports.model import BatchContext, Model, layers_keep_shapes
from drawloom.components.ports.parameter_roles import Role
from drawloom.components.ports.pipeline import Loss, Schedule
from drawloom.components.ports.run import RunInfo
from drawloom.components.ports.slices import TensorSlice
from drawloom.components.ports.stages import Recompute, Stage
from drawloom.components.stages.activation_specs import ActivationSpecs
from drawloom.components.stages.build import ParallelModules, StageBuilder, tie_equally_named_parameters
from drawloom.components.stages.checks import (
    check_embedding_and_head_costs_are_used,
    check_initial_folder,
    check_loss_is_not_module,
    check_memory_policy,
    check_recompute_is_set_once,
    describe_chosen_layer_partition,
    describe_recompute_fault,
    describe_recompute_policy,
    find_stage_nodes,
    warn_fused_split_backward,
    warn_narrowed_weights,
)
from drawloom.components.stages.feature_stack import FeatureStack, check_features, describe_features
from drawloom.components.stages.initial_values import InitialValues, check_parameters_fit_device
from drawloom.components.stages.model_precision import add_model_uncast_patterns
from drawloom.components.stages.parameters import StageParameters
from drawloom.components.weights.adapted import build_meta_model_with_adapters
from drawloom.graph import Problem, UserError, above, at_least, component, setting, wired
from drawloom.graph.wiring.node import NodeView
from drawloom.kernels.recompute import make_recomputable

if TYPE_CHECKING:
    from drawloom.components.parallel.fsdp import ShardedStore

FROZEN = "frozen"
"""
The entry of a state with the fingerprint of frozen weights, which the state omits. Names of parameters contain dots.
"""


@component(
    replaced_keys={
        "capture": 'a table [capture] with use = "pipeline.captured"',
        "compile": 'a table [compile] with use = "stages.compiled"',
        "offload": 'a table [offload] with use = "pipeline.offloaded"',
        "stream_frozen": 'a table [streamed] with use = "frozen_weights.streamed"',
        "transforms": 'features = ["@name"], or a table with a feature, which is found by type',
    }
)
class MaterializedStages:
    """
    This rank's stages: built on the meta device, adapted, transformed, materialized, and then initialized or loaded.

    With `adapters`, only the adapters' parameters are trained. A checkpoint has the trained parameters and a
    fingerprint of the frozen ones, which a resumed run recreates from the same folder or seed.
    """

    model: Model
    loss: Loss
    schedule: Schedule
    mesh: Mesh
    device: Device
    precision: Precision
    job: RunInfo
    adapters: list[Adapter] = attrs.field(factory=list)
    features: list[StageFeature] = wired(factory=list)
    dispatcher: Dispatcher | None = None
    memory: MemoryPolicy | None = None
    embedding_layer_cost: int = setting(
        default=0,
        check=at_least(0),
        impact="safe",
        doc="embedding cost in layers; the first stage gets fewer layers by this number",
    )
    head_layer_cost: int = setting(
        default=0,
        check=at_least(0),
        impact="safe",
        doc="head cost in layers; the last stage gets fewer layers by this number",
    )
    reshard_after_forward: bool | None = setting(
        default=None,
        impact="safe",
        doc="whether FSDP frees a layer's gathered parameters after its forward and gathers them again in its "
        "backward: less memory, more communication; default: true with one pipeline rank",
    )
    sync_each_microbatch: bool = setting(
        default=False,
        impact="safe",
        doc=(
            "whether FSDP ranks reduce gradients after every microbatch instead of after gradient accumulation: "
            "less memory, more communication"
        ),
    )
    bucket_bytes: int = setting(
        default=BUCKET_BYTES,
        impact="safe",
        check=above(0),
        doc="bytes per DDP gradient bucket, which replicas sum in one collective during the backward pass",
    )
    recompute: Recompute = setting(
        default="none",
        impact="safe",
        check=describe_recompute_fault,
        doc=(
            "activation checkpointing policy; 'none'; 'selective': norms, gates and rotations; 'blocks': every "
            "block; a number n: one block in n; 'quantized': 'selective' with inputs of norms and gates in 8 bits, "
            "which rounds gradients"
        ),
    )
    weights: Path | None = setting(
        default=None,
        doc="Hugging Face folder with initial weights; default: `model.auto`'s folder, or random weights",
    )
    _values: InitialValues = attrs.field(init=False, default=None)
    local: list[Stage] = attrs.field(init=False, factory=list)  # this rank's stages, in order
    store: "ParameterStore | ShardedStore" = attrs.field(init=False, default=None)
    _activations: ActivationSpecs = attrs.field(init=False, default=None)
    _parameters: StageParameters = attrs.field(init=False, default=None)
    _fingerprint: str = attrs.field(init=False, default="")

    @classmethod
    def constraints(cls, node: NodeView) -> Iterator[Problem]:
        """Yield conflicts between settings: see checks.py, compilation.py, and each mesh dimension's `check`."""
        if nodes := find_stage_nodes(node):
            for dimension in DIMENSIONS:
                yield from dimension.check(nodes)
            if schedule := node.neighbour("schedule"):
                yield from warn_fused_split_backward(node, schedule, nodes.mesh)
                yield from check_recompute_is_set_once(node, schedule, nodes.mesh)
            yield from check_features(nodes)
        yield from warn_narrowed_weights(node)
        if loss := node.neighbour("loss"):
            yield from check_loss_is_not_module(node, loss)
        if schedule := node.neighbour("schedule"):
            yield from check_embedding_and_head_costs_are_used(node, schedule)
            yield from check_memory_policy(node, schedule)

    @classmethod
    def resume_impact(cls, node: NodeView, key: str, before: Any) -> tuple[str, str] | None:
        """Return changes_training if `recompute` begins or ceases to round gradients."""
        changes = key == "recompute" and "quantized" in (before, node.settings["recompute"])
        return ("changes_training", "'quantized' rounds gradients") if changes else None

    @classmethod
    def notes(cls, node: NodeView) -> Iterator[str]:
        """Yield sentences for `explain`: recomputation, features, formats, mesh dimensions and layers."""
        yield from describe_recompute_policy(node.settings["recompute"])
        if nodes := find_stage_nodes(node):
            yield from describe_features(nodes)
            for dimension in DIMENSIONS:
                yield from dimension.notes(nodes)
            schedule = node.neighbour("schedule")
            if schedule and nodes.model:
                yield from describe_chosen_layer_partition(schedule, nodes.mesh, nodes.model)

    def check_before_open(self) -> None:
        """
        Raise UserError if `weights` is not a folder of readable safetensors files, its head is of another kind, or
        adapters match nothing.
        """
        if self.adapters:
            build_meta_model_with_adapters(self.model, self.adapters)
        check_initial_folder(self.weights, self.model, self.loss)

    def open(self) -> None:
        """Build, parallelize and materialize this rank's stages, with initial or loaded values."""
        if self.mesh.sizes.expert > 1 and not supports_expert_parallel(self.dispatcher):
            raise UserError(f"{NO_DISPATCHER}; {WRITE_DISPATCHER}", exit_code=2)
        parallel = self._build_parallel_modules_on_meta()
        self._activations = ActivationSpecs(
            parallel.spans, self.builder.build_meta_module_for_activations, self._do_layers_keep_shapes
        )
        self._set_stages(parallel, self._materialize(parallel))
        blocks = [[*self.model.blocks(module)] for module in parallel.modules.values()]
        self._features.finish([*parallel.modules.values()], [*chain.from_iterable(blocks)])
        for blocks_of_stage in blocks:
            make_recomputable(blocks_of_stage)
        self._parameters.find_ranks_with_parameters()
        self._fingerprint = self._values.fingerprint_frozen_source(self._parameters.all_parameters().values())
        self._check_patterns_over_ranks()

    def build_meta_stages(self) -> None:
        """Build and parallelize this rank's stages without memory and values, for plans."""
        parallel = self._build_parallel_modules_on_meta()
        modules = [*parallel.modules.values()]
        tie_equally_named_parameters(modules)
        self._features.place_on_meta(modules)
        self._set_stages(parallel, self._create_data_parallel(parallel).create_planned_store(modules))

    @cached_property
    def _features(self) -> FeatureStack:
        return FeatureStack(self.features)

    @cached_property
    def _dimensions(self) -> list[Dimension]:
        return [dimension(self.mesh) for dimension in DIMENSIONS]

    @cached_property
    def _model_precision(self) -> Precision:
        """Return the precision with the model's own `uncast` patterns."""
        return add_model_uncast_patterns(self.precision, self.model)

    @cached_property
    def builder(self) -> StageBuilder:
        return StageBuilder(
            model=self.model,
            loss=self.loss,
            schedule=self.schedule,
            mesh=self.mesh,
            precision=self._model_precision,
            adapters=self.adapters,
            features=self._features,
            dispatcher=self.dispatcher,
            dimensions=self._dimensions,
            embedding_layer_cost=self.embedding_layer_cost,
            head_layer_cost=self.head_layer_cost,
        )

    def _build_parallel_modules_on_meta(self) -> ParallelModules:
        """Build this rank's modules on the meta device, split over ranks."""
        return self.builder.build_local_modules()

    def _create_data_parallel(self, parallel: ParallelModules) -> DataParallel:
        """Return the data parallelism (DDP, FSDP, HSDP) for the modules, as the settings define it."""
        return DataParallel(
            mesh=self.mesh,
            precision=self._model_precision,
            blocks=self.model.blocks,
            gathers_per_block=should_gather_per_block(self.reshard_after_forward, self.mesh.sizes.pipeline),
            reduces_per_microbatch=self.sync_each_microbatch,
            bucket_bytes=self.bucket_bytes,
            # Replicas sum gradients in hooks during a backward pass.
            overlaps=self._features.do_gradient_hooks_run,
            experts=parallel.experts,
        )

    def _materialize(self, parallel: ParallelModules) -> "ParameterStore | ShardedStore":
        """Shard modules, allocate and initialize them, and return their parameter store."""
        modules = [*parallel.modules.values()]
        self._features.place(modules)
        check_parameters_fit_device(modules, self.mesh.shard_group.size, self.device.device)
        data_parallel = self._create_data_parallel(parallel)
        sharded = data_parallel.shard_modules(modules)
        slices = {name: rank_slice.tensor_slice for name, rank_slice in parallel.splits.items()}
        self._values = InitialValues(self.model, self.job.seed, self.device.device, self.weights, slices)
        run_and_gather_on_all_ranks(self.mesh.world, partial(self._values.allocate_and_fill_modules, modules))
        if self.adapters:
            self._values.initialize_adapters_on_all_ranks(modules)
        tie_equally_named_parameters(modules)
        return data_parallel.create_store(modules, sharded)

    def _set_stages(self, parallel: ParallelModules, store: "ParameterStore | ShardedStore") -> None:
        """Set this rank's stages from the modules, with parameters in `store`."""
        self.store = store
        self._features.allocate([*parallel.modules.values()])
        policies = self._choose_recompute_policies(len(parallel.spans))
        self.local = [
            Stage(
                index=index,
                count=len(parallel.spans),
                span=parallel.spans[index],
                module=module,
                masters=store.masters,
                shards=store.get_shards(module),
                adapters=self.adapters,
                splits=parallel.splits,
                recompute=policies[index],
                read_or_draw_frozen_values=None if self._values is None else self._values.read_or_draw_frozen_values,
            )
            for index, module in parallel.modules.items()
        ]
        self._parameters = StageParameters(
            stages=self.local,
            store=store,
            dimensions=self._dimensions,
            precision=self._model_precision,
            device=self.device.device,
            bucket_bytes=self.bucket_bytes,
            splits=parallel.splits,
            experts=parallel.experts,
        )

    def _choose_recompute_policies(self, stages: int) -> Sequence[Recompute]:
        """Return the memory policy's choice by stage, or the setting."""
        return (self.recompute,) * stages if self.memory is None else self.memory.choose().recompute

    @property
    def _do_layers_keep_shapes(self) -> bool:
        """Whether every layer keeps its input shapes: the model declares it, and nothing here changes layers."""
        unchanged = self._features.do_layers_keep_shapes and not self.precision.uncast
        return unchanged and layers_keep_shapes(self.model)

    def infer_stage_inputs(self, stage: int, inputs: Any, shared: BatchContext) -> Any:
        return self._activations.infer_stage_inputs(stage, inputs, shared)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return all local stages' trained parameters, without duplicates; [] before `open`."""
        return [] if self._parameters is None else self._parameters.named_parameters()

    def parameter_slices(self) -> dict[str, TensorSlice | None]:
        return {name: self._parameters.get_rank_slice(name) for name, _ in self.named_parameters()}

    @property
    def initial_folder(self) -> Path | None:
        return None if self._values is None else self._values.folder

    def roles(self) -> dict[str, Role]:
        return self._parameters.roles()

    def owned_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return self._parameters.owned_parameters()

    def cast_weights(self, only_if_changed: bool = False) -> None:
        self.store.cast_masters_to_copies(only_if_changed)
        self._features.before_passes(only_if_changed)

    def move_gradients_to_masters(self) -> None:
        self.store.move_gradients_to_masters()
        self._features.after_backward()

    def device_bytes(self) -> dict[MemoryKind, int]:
        """
        Return the bytes in parameters, buffers, masters and compute copies, and in a step's gradients; {} before
        `open`.
        """
        if self._parameters is None:
            return {}
        sizes = self._parameters.device_bytes()
        self._features.change_device_bytes(sizes)
        return sizes

    @property
    def feature_host_bytes(self) -> int:
        """Bytes of weights in host memory."""
        return self._features.count_host_bytes()

    def sum_remaining_gradients(self) -> None:
        """Sum the gradients not summed in backward passes; a pipeline rank without a parameter adds zeros."""
        self._parameters.sum_remaining_gradients()

    def state_slices(self) -> dict[str, TensorSlice | None]:
        """Return this rank's slices by name, for trained parameters and persistent buffers; None for whole ones."""
        return {name: self._parameters.get_rank_slice(name) for name in self.state_dict()}

    def state_dict(self) -> dict[str, Any]:
        """Return trained parameters and persistent buffers by name, and a fingerprint for frozen parameters."""
        state: dict[str, Any] = {
            name: tensor.detach() for tensors in self._parameters.state_tensors() for name, tensor in tensors.items()
        }
        return state | ({FROZEN: self._fingerprint} if self._fingerprint else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Copy saved tensors into place. Raises KeyError for other names, and UserError for other frozen parameters."""
        if other := self.state_slices().keys() ^ state.keys():
            raise KeyError(
                f"the checkpoint and the stages have different parameters and buffers; only one has {sorted(other)}"
            )
        if state.get(FROZEN) != (self._fingerprint or None):
            raise UserError(self._values.format_changed_source_error())
        with torch.no_grad():
            # By stage, because two stages of this rank may have buffers with the same name.
            for tensors in self._parameters.state_tensors():
                for name, tensor in tensors.items():
                    tensor.copy_(state[name])

    def describe_features(self, whole: nn.Module) -> Iterator[str]:
        return self._features.describe_model(whole, self._model_precision)

    def _check_patterns_over_ranks(self) -> None:
        """Raise UserError for a pattern of the precision or a feature that matches nothing on any rank."""
        modules = [stage.module for stage in self.local]
        parameters = [name for module in modules for name, _ in module.named_parameters()]
        uncast = NamePatterns("precision", "uncast", "parameter", self.precision.uncast, parameters)
        for setting_of_patterns in (uncast, *self._features.name_patterns(modules)):
            self._check_patterns_match_on_some_rank(setting_of_patterns)

    def _check_patterns_match_on_some_rank(self, use: NamePatterns) -> None:
        """Raise UserError if a pattern matches no name on any pipeline rank. A collective."""
        matched_here = [pattern for pattern in use.patterns if use.matches(pattern)]
        matched = {pattern for by_rank in self.mesh.pipeline_group.gather_json(matched_here) for pattern in by_rank}
        if unknown := [pattern for pattern in use.patterns if pattern not in matched]:
            raise UserError(f"{use.component}.{use.setting}: {use.describe_fault(unknown[0])}", exit_code=2)
