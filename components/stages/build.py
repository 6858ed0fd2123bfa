"""This rank's stage modules on the meta device: built from the model, adapted, transformed and split over ranks."""

from collections.abc import Mapping, Sequence, Set

import attrs
import torch
from torch import nn

from drawloom import UserError
from drawloom.components.parallel.dimension import Dimension
from drawloom.components.parallel.expert import ExpertDimension
from drawloom.components.parallel.master_weights import choose_layer_dtype
from drawloom.components.parallel.pipeline import build_layer_ranges, partition_layers, split_off_embedding_and_head
from drawloom.components.parallel.split_experts import set_dispatcher
from drawloom.components.pipeline.program.builders import list_stages_of_rank
from drawloom.ports import (
    LOSS,
    Adapter,
    Dispatcher,
    LayerRange,
    Loss,
    Mesh,
    Model,
    OuterLayersSchedule,
    PartitioningSchedule,
    Precision,
    RankSlice,
    Schedule,
    StageFeature,
    embeds_on_every_rank,
    find_loss_module,
)


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
