"""
Assembly of this rank's stages: split modules on the meta device, then memory and values.

`StageParameters` are this rank's parameters for other components: names, slices, gradients and state.
"""

from collections.abc import Mapping, Sequence, Set
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from drawloom import UserError, internal
from drawloom.components.distributed.rank_errors import run_and_gather_on_all_ranks
from drawloom.components.parallel.data_parallel import DataParallel
from drawloom.components.parallel.data_shard import should_gather_per_block
from drawloom.components.parallel.dimension import Dimension, RankParameters
from drawloom.components.parallel.dimensions import DIMENSIONS
from drawloom.components.parallel.expert import ExpertDimension
from drawloom.components.parallel.layer_partition import (
    build_layer_ranges,
    partition_layers,
    split_off_embedding_and_head,
)
from drawloom.components.parallel.master_weights import ParameterStore, choose_layer_dtype
from drawloom.components.pipeline.program.builders import list_stages_of_rank
from drawloom.components.stages.feature_stack import FeatureStack
from drawloom.components.stages.initial_values import InitialValues, check_parameters_fit_device
from drawloom.ports import (
    LOSS,
    Adapter,
    Dispatcher,
    LayerRange,
    Loss,
    MemoryKind,
    Mesh,
    Model,
    NamePatterns,
    OuterLayersSchedule,
    PartitioningSchedule,
    Precision,
    RankSlice,
    Role,
    Schedule,
    Stage,
    StageFeature,
    TensorSlice,
    UncastParameters,
    WeightCopies,
    embeds_on_every_rank,
    find_loss_module,
    layers_keep_shapes,
    parameter_roles,
)

if TYPE_CHECKING:
    from drawloom.components.parallel.fsdp import ShardedStore
    from drawloom.components.stages.activation_specs import ActivationSpecs


@attrs.frozen(kw_only=True, eq=False)
class ParallelModules:
    """
    This rank's modules on the meta device, by stage, and all stages' layer ranges (`spans`).

    `splits` are this rank's slices by split parameter; `experts` are the names of parameters split over expert ranks.
    """

    spans: Sequence[LayerRange]
    modules: Mapping[int, nn.Module]
    splits: Mapping[str, RankSlice]
    experts: Set[str]


@attrs.frozen(kw_only=True, eq=False)
class StageBuilder:
    """Builder for stage modules on a mesh; `dimensions` determine how ranks split them."""

    model: Model
    loss: Loss
    schedule: Schedule
    mesh: Mesh
    precision: Precision
    adapters: Sequence[Adapter]
    features: StageFeature
    dispatcher: Dispatcher | None
    dimensions: Sequence[Dimension]
    embedding_layer_cost: int
    head_layer_cost: int

    def build_local_modules(self) -> ParallelModules:
        """Build and split this rank's stage modules."""
        owners = self.schedule.stage_to_rank(self.mesh.sizes.pipeline)
        spans, local = self._partition_layers(len(owners)), list_stages_of_rank(self.mesh.indices.pipeline, owners)
        if embeds_on_every_rank(self.schedule):
            spans = split_off_embedding_and_head(spans, self.model.num_hidden_layers)
            local = [0, *(index + 1 for index in local), len(spans) - 1]
        if self.adapters:
            from drawloom.components.weights.adapted import build_meta_model_with_adapters

            # checks patterns on the whole model, not on this rank's part
            build_meta_model_with_adapters(self.model, self.adapters)
        splits: dict[str, RankSlice] = {}
        experts: set[str] = set()
        modules = {index: self.build_stage_module_on_meta(spans[index]) for index in local}
        for module in modules.values():
            for dimension in self.dimensions:
                slices = dimension.apply_to_meta_module(module)
                splits |= slices
                if isinstance(dimension, ExpertDimension):
                    experts |= slices.keys()
            self._cast_parameters_to_stored_dtypes(module)
            self.features.convert(module, self.precision, splits)
        return ParallelModules(spans=spans, modules=modules, splits=splits, experts=experts)

    def build_stage_module_on_meta(self, span: LayerRange) -> nn.Module:
        """Build a layer range's module on the meta device, not yet split, with adapters and features."""
        with torch.device("meta"):
            module = self.model.build(span)
            if self.adapters:
                from drawloom.components.weights.adapted import freeze_adapt_and_list_targets

                freeze_adapt_and_list_targets(self.adapters, module)
        if span.head and (loss_module := find_loss_module(self.loss)) is not None:
            module.add_module(LOSS, loss_module)
        module = self.features.transform(module)
        check_no_shared_parameters(module)
        if self.dispatcher is not None:
            from drawloom.components.parallel.split_experts import set_dispatcher

            set_dispatcher(module, self.dispatcher)
        return module

    def build_meta_module_for_activations(self, span: LayerRange) -> nn.Module:
        """Build a layer range's split module in compute dtypes, which infers activations' shapes and dtypes."""
        module = self.build_stage_module_on_meta(span)
        splits: dict[str, RankSlice] = {}
        for dimension in self.dimensions:
            splits |= dimension.apply_to_meta_module(module)
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(choose_layer_dtype(name, self.precision))
        self.features.convert(module, self.precision, splits)
        return module

    def _cast_parameters_to_stored_dtypes(self, module: nn.Module) -> None:
        """Cast meta parameters to the dtypes they are stored in; buffers keep theirs."""
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point():
                # A frozen parameter has the dtype of its layer, because no optimizer needs a wider one.
                dtype = (
                    self.precision.parameter if parameter.requires_grad else choose_layer_dtype(name, self.precision)
                )
                parameter.data = parameter.data.to(dtype)

    def _partition_layers(self, stages: int) -> list[LayerRange]:
        """Return every stage's layers."""
        layers, ranks = self.model.num_hidden_layers, self.mesh.sizes.pipeline
        if isinstance(self.schedule, PartitioningSchedule):
            sizes = [*self.schedule.layers_by_stage(ranks, layers)]
            if len(sizes) != stages or sum(sizes) != layers or min(sizes) < 1:
                text = f"layers_by_stage returns {sizes} for {layers} layers in {stages} stages"
                hint = f"return at least 1 layer for each stage, and {layers} in all"
                raise UserError(f"{type(self.schedule).__name__}.{text}; {hint}")
            return build_layer_ranges(sizes)
        try:
            if isinstance(self.schedule, OuterLayersSchedule):
                # every rank has the other layers
                layers = self.schedule.get_pipelined_layer_count(ranks, layers)
            return partition_layers(layers, stages, self.embedding_layer_cost, self.head_layer_cost)
        except ValueError as error:
            raise UserError(f"{error}; use fewer stages", exit_code=2) from error


def check_no_shared_parameters(module: nn.Module) -> None:
    """Raise UserError for a parameter in two modules, because both would allocate their own copies."""
    owners: dict[nn.Parameter, str] = {}
    for path, submodule in module.named_modules():
        for leaf, parameter in submodule.named_parameters(prefix=path, recurse=False):
            if (first := owners.setdefault(parameter, leaf)) != leaf:
                text = f"{first} and {leaf} are one parameter of two modules, but a run would allocate it twice"
                raise UserError(f"{text}; put it in one module, and use this module in both layers", exit_code=2)


def tie_equally_named_parameters(modules: Sequence[nn.Module]) -> None:
    """Tie weights: replace parameters with equal names in several modules by the first one."""
    first: dict[str, nn.Parameter] = {}
    for module in modules:
        for name, parameter in list(module.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, first.setdefault(name, parameter))


@attrs.define(eq=False, kw_only=True)
class StageParameters:
    """
    Parameters of this rank's `stages`, kept in `store`.

    `splits` are this rank's slices of parameters split over tensor or expert ranks; `experts` are experts' parameter
    names.
    """

    stages: Sequence[Stage]
    store: "ParameterStore | ShardedStore"
    dimensions: Sequence[Dimension]
    precision: Precision
    device: torch.device
    bucket_bytes: int
    splits: Mapping[str, RankSlice]
    experts: Set[str]
    # Trained parameters of each stage, cached because a walk through modules takes milliseconds in every phase.
    trained_by_stage: list[dict[str, nn.Parameter]] = internal()
    named: dict[str, nn.Parameter] = internal()

    def __attrs_post_init__(self) -> None:
        """Collect the trained parameters."""
        self.trained_by_stage = [
            {name: parameter for name, parameter in stage.named_masters_or_parameters() if parameter.requires_grad}
            for stage in self.stages
        ]
        self.named = {name: parameter for trained in self.trained_by_stage for name, parameter in trained.items()}

    def find_ranks_with_parameters(self) -> None:
        """Determine which other ranks have these parameters; a collective."""
        for dimension in self.dimensions:
            dimension.exchange_replicated_parameter_names(self.named)

    def roles(self) -> dict[str, Role]:
        """Return the trained parameters' roles, as the stages' modules declare them."""
        declared = {name: role for stage in self.stages for name, role in parameter_roles(stage.module)}
        return {name: declared[name] for name in self.named}

    def all_parameters(self) -> dict[str, nn.Parameter]:
        """Return the stages' parameters by name, including frozen ones."""
        return {name: parameter for stage in self.stages for name, parameter in stage.named_masters_or_parameters()}

    def owned_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return this rank's owned parameters. Every model parameter is owned by exactly one rank."""
        shared = self._rank_parameters
        elsewhere = set[str]().union(*(dimension.list_copies_owned_elsewhere(shared) for dimension in self.dimensions))
        return [(name, parameter) for name, parameter in self.named.items() if name not in elsewhere]

    @property
    def _rank_parameters(self) -> RankParameters:
        """Return how this rank shares its parameters with other ranks, for mesh dimensions."""
        return RankParameters(
            trained=self.named,
            split=self.splits.keys(),
            experts=self.experts,
            sharded=self.store.slices.keys(),
            summed=self.store.parameters_summed_in_backward,
            precision=self.precision,
            device=self.device,
            bucket_bytes=self.bucket_bytes,
        )

    def get_rank_slice(self, name: str) -> TensorSlice | None:
        """Return this rank's slice of a parameter; None if this rank has the whole parameter."""
        split = self.splits[name].tensor_slice if name in self.splits else None
        return TensorSlice.compose(split, self.store.slices.get(name))

    def device_bytes(self) -> dict[MemoryKind, int]:
        """Return the bytes in parameters, buffers, masters and compute copies, and in a step's gradients."""
        modules = [stage.module for stage in self.stages]
        tensors = dict.fromkeys(tensor for module in modules for tensor in chain(module.parameters(), module.buffers()))
        trained = sum(parameter.numel() for parameter in self.named.values())
        return {
            **self.store.device_bytes(),
            "parameters": sum(map(self.store.local_bytes, tensors)) - self.store.compute_copy_bytes,
            "gradients": trained * self.precision.gradient.itemsize,
        }

    def sum_remaining_gradients(self) -> None:
        """Sum gradients not yet summed in backward passes, along all mesh dimensions, innermost first."""
        shared = self._rank_parameters
        for dimension in reversed(self.dimensions):
            dimension.sum_remaining_gradients(shared)


@attrs.define(eq=False, slots=False)
class StageAssembly:
    """This rank's stages, built as the component's settings say; its attributes follow from `materialize`."""

    settings: Any  # the component, which imports this module
    features: FeatureStack = internal(attrs.Factory(lambda self: FeatureStack(self.settings.features), takes_self=True))
    local: list[Stage] = internal(factory=list)  # this rank's stages, in order
    store: "ParameterStore | ShardedStore" = internal(None)
    parameters: StageParameters = internal(None)
    spans: Sequence[LayerRange] = internal(factory=list)  # of all stages
    values: InitialValues = internal(None)
    fingerprint: str = internal("")  # of the frozen weights' source; empty if all parameters are trained

    def materialize(self) -> None:
        """Build, parallelize and allocate the stages, and fill them with initial or loaded values; a collective."""
        model, parallel = self.settings.model, self.builder.build_local_modules()
        modules = [*parallel.modules.values()]
        self.spans = parallel.spans
        self._set_stages(parallel, self._allocate_and_fill(parallel))
        self.features.finish(modules, [*chain.from_iterable(map(model.blocks, modules))])
        self.parameters.find_ranks_with_parameters()
        self.fingerprint = self.values.fingerprint_frozen_source(self.parameters.all_parameters().values())
        self._check_patterns_over_ranks()

    def list_weight_copies(self) -> list[WeightCopies]:
        """Return the store, if it has copies or sums gradients, and the features."""
        has_copies = self.store.masters or self.store.parameters_summed_in_backward
        return [*([self.store] if has_copies else []), *self.features.features]

    def build_on_meta(self) -> None:
        """Build and parallelize the stages without memory and values, for plans."""
        parallel = self.builder.build_local_modules()
        modules = [*parallel.modules.values()]
        tie_equally_named_parameters(modules)
        blocks = chain.from_iterable(map(self.settings.model.blocks, modules))
        self.features.place_on_meta(modules, [*blocks])
        self._set_stages(parallel, self._create_data_parallel(parallel).create_planned_store(modules))

    @cached_property
    def activations(self) -> "ActivationSpecs":
        """Shapes and dtypes of stages' inputs, which several stages ask for."""
        from drawloom.components.stages.activation_specs import ActivationSpecs

        return ActivationSpecs(self.spans, self.builder.build_meta_module_for_activations, self._do_layers_keep_shapes)

    @cached_property
    def dimensions(self) -> list[Dimension]:
        return [dimension(self.settings.mesh) for dimension in DIMENSIONS]

    @cached_property
    def precision(self) -> Precision:
        """The precision with the model's own `uncast` patterns."""
        return add_model_uncast_patterns(self.settings.precision, self.settings.model)

    @cached_property
    def builder(self) -> StageBuilder:
        return StageBuilder(
            model=self.settings.model,
            loss=self.settings.loss,
            schedule=self.settings.schedule,
            mesh=self.settings.mesh,
            precision=self.precision,
            adapters=self.settings.adapters,
            features=self.features,
            dispatcher=self.settings.dispatcher,
            dimensions=self.dimensions,
            embedding_layer_cost=self.settings.embedding_layer_cost,
            head_layer_cost=self.settings.head_layer_cost,
        )

    def _create_data_parallel(self, parallel: ParallelModules) -> DataParallel:
        """Return the data parallelism (DDP, FSDP, HSDP) for the modules, as the settings define it."""
        mesh = self.settings.mesh
        return DataParallel(
            mesh=mesh,
            precision=self.precision,
            blocks=self.settings.model.blocks,
            gathers_per_block=should_gather_per_block(self.settings.reshard_after_forward, mesh.sizes.pipeline),
            reduces_per_microbatch=self.settings.sync_each_microbatch,
            bucket_bytes=self.settings.bucket_bytes,
            experts=parallel.experts,
        )

    def _allocate_and_fill(self, parallel: ParallelModules) -> "ParameterStore | ShardedStore":
        """Shard modules, allocate and initialize them, and return their parameter store."""
        settings, modules = self.settings, [*parallel.modules.values()]
        self.features.place(modules)
        check_parameters_fit_device(modules, settings.mesh.shard_group.size, settings.device.device)
        data_parallel = self._create_data_parallel(parallel)
        sharded = data_parallel.shard_modules(modules)
        slices = {name: rank_slice.tensor_slice for name, rank_slice in parallel.splits.items()}
        self.values = InitialValues(settings.model, settings.job.seed, settings.device.device, settings.weights, slices)
        for feature in self.features.features:
            self.values = feature.change_initial_values(self.values)
        # A reading error on one rank is raised on all ranks; otherwise the others would wait in the next collective.
        run_and_gather_on_all_ranks(settings.mesh.world, partial(self.values.allocate_and_fill_modules, modules))
        if settings.adapters:
            self.values.initialize_adapters_on_all_ranks(modules)
        if settings.adapter_weights is not None:
            read = partial(self.values.read_adapters, settings.adapter_weights, modules, settings.adapters)
            run_and_gather_on_all_ranks(settings.mesh.world, read)
        tie_equally_named_parameters(modules)
        store = data_parallel.create_store(modules, sharded)
        for feature in self.features.features:
            feature.change_shards(sharded)  # whose slices have master parameters since the store's creation
        return store

    def _set_stages(self, parallel: ParallelModules, store: "ParameterStore | ShardedStore") -> None:
        """Set this rank's stages from the modules, with parameters in `store`."""
        self.store = store
        self.features.allocate([*parallel.modules.values()])
        memory, count = self.settings.memory, len(parallel.spans)
        policies = (self.settings.recompute,) * count if memory is None else memory.choose().recompute
        self.local = [
            Stage(
                index=index,
                count=count,
                span=parallel.spans[index],
                module=module,
                masters=store.masters,
                shards=store.get_shards(module),
                adapters=self.settings.adapters,
                splits=parallel.splits,
                blocks=self.settings.model.blocks(module),
                recompute=policies[index],
                read_or_draw_frozen_values=None if self.values is None else self.values.read_or_draw_frozen_values,
            )
            for index, module in parallel.modules.items()
        ]
        self.parameters = StageParameters(
            stages=self.local,
            store=store,
            dimensions=self.dimensions,
            precision=self.precision,
            device=self.settings.device.device,
            bucket_bytes=self.settings.bucket_bytes,
            splits=parallel.splits,
            experts=parallel.experts,
        )

    @property
    def _do_layers_keep_shapes(self) -> bool:
        """Whether every layer keeps its input shapes: the model declares it, and nothing here changes layers."""
        unchanged = self.features.do_layers_keep_shapes and not self.settings.precision.uncast
        return unchanged and layers_keep_shapes(self.settings.model)

    def _check_patterns_over_ranks(self) -> None:
        """Raise UserError for a pattern of the precision or a feature without a match on any rank. A collective."""
        modules = [stage.module for stage in self.local]
        parameters = [name for module in modules for name, _ in module.named_parameters()]
        uncast = NamePatterns("precision", "uncast", "parameter", self.settings.precision.uncast, parameters)
        for use in (uncast, *self.features.name_patterns(modules)):
            matched_here = [pattern for pattern in use.patterns if use.matches(pattern)]
            matched = {*chain.from_iterable(self.settings.mesh.pipeline_group.gather_json(matched_here))}
            if unknown := [pattern for pattern in use.patterns if pattern not in matched]:
                raise UserError(f"{use.component}.{use.setting}: {use.describe_fault(unknown[0])}", exit_code=2)


@attrs.frozen
class ModelPrecision:
    """Recipe's precision whose `uncast` also includes the model's own patterns."""

    parameter: torch.dtype
    compute: torch.dtype
    gradient: torch.dtype
    reduce: torch.dtype
    uncast: Sequence[str]


def add_model_uncast_patterns(recipe: Precision, model: Model) -> Precision:
    """Return the recipe's precision, with the model's own patterns if it has some."""
    if not isinstance(model, UncastParameters):
        return recipe
    uncast = *recipe.uncast, *model.uncast_parameter_patterns()
    return ModelPrecision(recipe.parameter, recipe.compute, recipe.gradient, recipe.reduce, uncast)
