"""Pipeline parallelism: parameters on several ranks, and conflicts between schedule and layers."""

from collections import Counter
from collections.abc import Iterator, Mapping, Set
from typing import ClassVar

import attrs
from torch import nn

from drawloom import NodeView, Problem, UserError, internal
from drawloom.components.parallel.dimension import Dimension, RankParameters
from drawloom.graph.lifecycle import Constrained
from drawloom.ports import OuterLayersSchedule, PartitioningSchedule, PerDimension, Schedule, StageNodes


@attrs.define(eq=False)
class PipelineDimension(Dimension):
    """Ranks with consecutive layers of a model; a shared parameter is copied to all its ranks."""

    name: ClassVar[str] = "pipeline"
    _copies: dict[str, list[int]] = internal(factory=dict)  # shapes of parameters on several ranks
    _on_earlier_ranks: Set[str] = internal(frozenset())

    @classmethod
    def notes(cls, nodes: StageNodes) -> Iterator[str]:
        if (ranks := nodes.sizes.pipeline) > 1:
            yield f"layers: partitioned over {ranks} pipeline ranks"

    def exchange_replicated_parameter_names(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Find the parameters on several ranks: a tied embedding is on the first and on the last."""
        group = self.mesh.pipeline_group
        shapes: list[dict[str, list[int]]] = group.gather_json({name: [*part.shape] for name, part in trained.items()})
        copy_counts = Counter(name for by_name in shapes for name in by_name)
        shape_by_name = {name: shape for by_name in shapes for name, shape in by_name.items()}
        self._copies = {name: shape_by_name[name] for name in sorted(copy_counts) if copy_counts[name] > 1}
        self._on_earlier_ranks = {name for by_name in shapes[: group.rank] for name in by_name}

    def list_copies_owned_elsewhere(self, parameters: RankParameters) -> Set[str]:
        return self._on_earlier_ranks

    def sum_remaining_gradients(self, parameters: RankParameters) -> None:
        """Sum the copies' gradients. Ranks without a copy add zeros, because all ranks join the collective."""
        gradients = [parameters.get_gradient_or_zeros(name, shape) for name, shape in self._copies.items()]
        parameters.sum_gradients_over_group(gradients, self.mesh.pipeline_group)


def find_layer_conflicts(schedule: NodeView, mesh: NodeView, model: NodeView) -> Iterator[Problem]:
    """Yield conflicts: a schedule for another rank count, or more stages than layers."""
    built = build_schedule_or_none(schedule)
    if built is None:
        return
    ranks, layers = PerDimension.from_settings(mesh.settings).pipeline, model.settings.get("num_hidden_layers")
    try:
        stages = len(built.stage_to_rank(ranks))
    except UserError as error:
        # A schedule that partitions layers does not fit because of its own settings.
        partitions = isinstance(built, PartitioningSchedule)
        yield schedule.problem("use", str(error)) if partitions else mesh.problem("pipeline", str(error))
        return
    if isinstance(layers, int) and layers < stages:
        text, hint = _describe_too_few_layers(layers, ranks, stages // ranks, model.name)
        yield mesh.problem("pipeline", text, hint)
    elif isinstance(layers, int) and isinstance(built, PartitioningSchedule):
        try:
            built.layers_by_stage(ranks, layers)
        except UserError as error:
            yield schedule.problem("use", str(error))
    elif isinstance(layers, int) and isinstance(built, OuterLayersSchedule):
        try:
            built.get_pipelined_layer_count(ranks, layers)
        except UserError as error:
            yield schedule.problem("pipeline_parallel_layers", str(error))


def build_schedule_or_none(schedule: NodeView) -> Schedule | None:
    """Return the schedule, which is cheap to construct; None if it has problems, which it reports itself."""
    if issubclass(schedule.component, Constrained) and any(schedule.component.constraints(schedule)):
        return None
    built: Schedule = schedule.component(**schedule.settings)
    return built


def _describe_too_few_layers(layers: int, ranks: int, per_rank: int, model: str) -> tuple[str, str]:
    """Return the fault and the remedy for a model with fewer layers than stages."""
    stages = ranks * per_rank
    fewer = f"write pipeline = {layers // per_rank} or less, or " if layers >= per_rank else ""
    text = f"{layers} layers can't be split over {ranks} ranks with {per_rank} stage{'s' * (per_rank > 1)} on each"
    return text, f"{fewer}write num_hidden_layers = {stages} or more in [{model}]"
