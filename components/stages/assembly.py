"""Assembly of this rank's stages: modules on the meta device, split over ranks, then memory and values."""

from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import attrs

from drawloom import UserError
from drawloom.components.distributed.rank_errors import run_and_gather_on_all_ranks
from drawloom.components.parallel.data_parallel import DataParallel
from drawloom.components.parallel.data_shard import should_gather_per_block
from drawloom.components.parallel.dimension import Dimension
from drawloom.components.parallel.dimensions import DIMENSIONS
from drawloom.components.parallel.master_weights import ParameterStore
from drawloom.components.stages.activation_specs import ActivationSpecs
from drawloom.components.stages.build import ParallelModules, StageBuilder, tie_equally_named_parameters
from drawloom.components.stages.feature_stack import FeatureStack
from drawloom.components.stages.initial_values import InitialValues, check_parameters_fit_device
from drawloom.components.stages.model_precision import add_model_uncast_patterns
from drawloom.components.stages.parameters import StageParameters
from drawloom.kernels.recompute.policy import make_recomputable
from drawloom.ports import NamePatterns, Precision, Stage, layers_keep_shapes

if TYPE_CHECKING:
    from drawloom.components.parallel.fsdp import ShardedStore


@attrs.define(eq=False, slots=False)
class StageAssembly:
    """This rank's stages, built as the component's settings say; its attributes follow from `materialize`."""

    settings: Any  # the component, which imports this module
    features: FeatureStack
    local: list[Stage] = attrs.field(init=False, factory=list)  # this rank's stages, in order
    store: "ParameterStore | ShardedStore" = attrs.field(init=False, default=None)
    parameters: StageParameters = attrs.field(init=False, default=None)
    activations: ActivationSpecs = attrs.field(init=False, default=None)
    values: InitialValues = attrs.field(init=False, default=None)
    fingerprint: str = attrs.field(init=False, default="")

    def materialize(self) -> None:
        """Build, parallelize and allocate the stages, and fill them with initial or loaded values."""
        model, parallel = self.settings.model, self.builder.build_local_modules()
        modules = [*parallel.modules.values()]
        self.activations = ActivationSpecs(
            parallel.spans, self.builder.build_meta_module_for_activations, self._do_layers_keep_shapes
        )
        self._set_stages(parallel, self._allocate_and_fill(parallel))
        blocks = [[*model.blocks(module)] for module in modules]
        self.features.finish(modules, [*chain.from_iterable(blocks)])
        for blocks_of_stage in blocks:
            make_recomputable(blocks_of_stage)
        self.parameters.find_ranks_with_parameters()
        self.fingerprint = self.values.fingerprint_frozen_source(self.parameters.all_parameters().values())
        self._check_patterns_over_ranks()

    def build_on_meta(self) -> None:
        """Build and parallelize the stages without memory and values, for plans."""
        parallel = self.builder.build_local_modules()
        modules = [*parallel.modules.values()]
        tie_equally_named_parameters(modules)
        self.features.place_on_meta(modules)
        self._set_stages(parallel, self._create_data_parallel(parallel).create_planned_store(modules))

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
            # Replicas sum gradients in hooks during a backward pass.
            overlaps=self.features.do_gradient_hooks_run,
            experts=parallel.experts,
        )

    def _allocate_and_fill(self, parallel: ParallelModules) -> "ParameterStore | ShardedStore":
        """Shard modules, allocate and initialize them, and return their parameter store."""
        of, modules = self.settings, [*parallel.modules.values()]
        self.features.place(modules)
        check_parameters_fit_device(modules, of.mesh.shard_group.size, of.device.device)
        data_parallel = self._create_data_parallel(parallel)
        sharded = data_parallel.shard_modules(modules)
        slices = {name: rank_slice.tensor_slice for name, rank_slice in parallel.splits.items()}
        self.values = InitialValues(of.model, of.job.seed, of.device.device, of.weights, slices)
        run_and_gather_on_all_ranks(of.mesh.world, partial(self.values.allocate_and_fill_modules, modules))
        if of.adapters:
            self.values.initialize_adapters_on_all_ranks(modules)
        tie_equally_named_parameters(modules)
        return data_parallel.create_store(modules, sharded)

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
