"""Pipeline parallelism: the partition of layers over ranks, and parameters that several of these hold."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import accumulate
from typing import ClassVar

import attrs
from torch import nn

from drawloom.components.parallel.dimension import Dimension, SharedParameters, StageNodes
from drawloom.components.ports.distributed import PerDimension
from drawloom.components.ports.model import LayerRange
from drawloom.components.ports.pipeline import OuterLayersSchedule, PartitioningSchedule, Schedule
from drawloom.graph import UserError
from drawloom.graph.lifecycle import Constrained
from drawloom.graph.problems import Problem
from drawloom.graph.wiring.node import NodeView


@attrs.define(eq=False)
class PipelineDimension(Dimension):
    """Ranks that hold the layers of a model in turn; a parameter that several of them need is a copy on each."""

    name: ClassVar[str] = "pipeline"
    _copies: dict[str, list[int]] = attrs.field(init=False, factory=dict)  # shapes of what several ranks hold
    _on_earlier_ranks: Set[str] = attrs.field(init=False, default=frozenset())

    @classmethod
    def notes(cls, nodes: StageNodes) -> Iterator[str]:
        if (ranks := nodes.sizes.pipeline) > 1:
            yield f"layers: partitioned over {ranks} pipeline ranks"

    def open(self, trained: Mapping[str, nn.Parameter]) -> None:
        """Find the parameters that several ranks hold: a tied embedding is on the first and on the last."""
        group = self.mesh.pipeline_group
        shapes: list[dict[str, list[int]]] = group.gather_json({name: [*part.shape] for name, part in trained.items()})
        holders = Counter(name for names in shapes for name in names)
        everywhere = {name: shape for names in shapes for name, shape in names.items()}
        self._copies = {name: everywhere[name] for name in sorted(holders) if holders[name] > 1}
        self._on_earlier_ranks = {name for names in shapes[: group.rank] for name in names}

    def owned_elsewhere(self, parameters: SharedParameters) -> Set[str]:
        return self._on_earlier_ranks

    def sum_gradients(self, parameters: SharedParameters) -> None:
        """Sum the gradients of copies; ranks without one take part with zeros, as the collective is of all ranks."""
        gradients = [parameters.gradient(name, shape) for name, shape in self._copies.items()]
        parameters.sum(gradients, self.mesh.pipeline_group)


def constraint_problems(schedule: NodeView, mesh: NodeView, model: NodeView) -> Iterator[Problem]:
    """Problems of the combination: a schedule for another number of ranks, or more stages than layers."""
    built = build_schedule(schedule)
    if built is None:
        return
    ranks, layers = PerDimension.of_settings(mesh.settings).pipeline, model.settings.get("num_hidden_layers")
    try:
        stages = len(built.stage_to_rank(ranks))
    except UserError as error:
        cuts = isinstance(built, PartitioningSchedule)  # then it is its settings that do not fit
        yield schedule.problem("use", str(error)) if cuts else mesh.problem("pipeline", str(error))
        return
    if isinstance(layers, int) and layers < stages:
        text, hint = _too_few(layers, ranks, stages // ranks, model.name)
        yield mesh.problem("pipeline", text, hint)
    elif isinstance(layers, int) and isinstance(built, PartitioningSchedule):
        try:
            built.layers_by_stage(ranks, layers)
        except UserError as error:
            yield schedule.problem("use", str(error))
    elif isinstance(layers, int) and isinstance(built, OuterLayersSchedule):
        try:
            built.layers_in_stages(ranks, layers)
        except UserError as error:
            yield schedule.problem("pipeline_parallel_layers", str(error))


def build_schedule(schedule: NodeView) -> Schedule | None:
    """The schedule, whose constructor is cheap; None if it has problems of its own, which it reports itself."""
    if issubclass(schedule.component, Constrained) and any(schedule.component.constraints(schedule)):
        return None
    built: Schedule = schedule.component(**schedule.settings)
    return built


def _too_few(layers: int, ranks: int, per_rank: int, model: str) -> tuple[str, str]:
    stages = ranks * per_rank
    fewer = f"write pipeline = {layers // per_rank} or less, or " if layers >= per_rank else ""
    text = f"{layers} layers can't be split over {ranks} ranks with {per_rank} stage{'s' * (per_rank > 1)} on each"
    return text, f"{fewer}write num_hidden_layers = {stages} or more in [{model}]"


def partition_layers(layers: int, stages: int, before: int = 0, after: int = 0) -> list[LayerRange]:
    """
    The layers of each stage, as even as possible; a remainder goes to the earlier stages.

    `before` and `after` are the costs of embedding and head, in layers: the first and the last stage get so many fewer
    layers, but at least one each. Raises ValueError for fewer layers than stages.
    """
    if layers < stages:
        raise ValueError(f"{layers} layers over {stages} stages leave a stage without any")
    costs = [1] * stages
    costs[0] += before
    costs[-1] += after
    sizes = [1] * stages
    # Each further layer goes to the stage that costs least so far, to the first of several.
    for _ in range(layers - stages):
        cheapest = costs.index(min(costs))
        costs[cheapest] += 1
        sizes[cheapest] += 1
    return layer_ranges(sizes)


def layer_ranges(sizes: Sequence[int]) -> list[LayerRange]:
    """The stages with these numbers of layers, of which the first one has the embedding and the last one the head."""
    ends, last = accumulate(sizes), len(sizes) - 1
    return [
        LayerRange(end - size, end, embedding=stage == 0, head=stage == last)
        for stage, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


def with_ends_apart(spans: Sequence[LayerRange], layers: int) -> list[LayerRange]:
    """
    Return the same spans without ends, between the embedding's span and the head's.

    The head's span has those of the model's `layers` that no other span has.
    """
    inner = [attrs.evolve(span, embedding=False, head=False) for span in spans]
    head = LayerRange(spans[-1].last, layers, embedding=False, head=True)
    return [LayerRange(0, 0, embedding=True, head=False), *inner, head]
