"""Plans a recipe: what each rank holds, and how long a step takes, without processes, memory or data."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeVar

import attrs
import torch

from drawloom.components.distributed.device_model import DeviceModel, products_in
from drawloom.components.distributed.planned import PlannedDevice, PlannedMesh
from drawloom.components.parallel.dimensions import DIMENSIONS
from drawloom.components.parallel.pipeline import PipelineDimension
from drawloom.components.pipeline.program.lowering import with_whole_backwards
from drawloom.components.pipeline.program.timing import CostTable, Deadlock
from drawloom.components.planning.attention import Attended, Rows, attended
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.rank_view import Elements, RankView, link
from drawloom.components.planning.stage_costs import Recordings, StageCosts, StageMeter
from drawloom.components.planning.step_time import StepTime, cost_table, step_time
from drawloom.components.planning.timeline import Peak, peak_of
from drawloom.components.ports.flops import CountsFlops, ForwardFlops, UpdateFlops
from drawloom.components.ports.memory import memory_by_kind
from drawloom.components.ports.pipeline import PartitioningSchedule, Referenced, Schedule, embeds_on_every_rank
from drawloom.components.ports.program import Program
from drawloom.graph import UserError
from drawloom.graph.project import Recipe

T = TypeVar("T")

WITHIN_STAGES = [dimension.name for dimension in DIMENSIONS if dimension.splits_work]
"""Dimensions of the mesh along which ranks exchange activations inside of a stage."""


@attrs.frozen
class RankMemory:
    """
    Bytes of a pipeline rank: what it has all the time by kind, the peak of what a step adds, and what else it keeps.

    Gradients are among what a step adds, for they come with the first backward pass and go with the update. Those of
    sharded parameters may be whole while backward passes go on: then they take `whole_gradients`.
    """

    stages: Sequence[int]
    kept: Mapping[str, int]
    gradients: int
    whole_gradients: int
    step: Peak
    buffers: Mapping[str, int]
    at_the_end: int

    @property
    def peak(self) -> int:
        """The most bytes at one time: in the middle of the step, or at its end, when gradients are summed."""
        return sum(self.kept.values()) + sum(self.buffers.values()) + max(self.step.bytes, self.at_the_end)

    @property
    def peak_gradients(self) -> int:
        """Bytes of gradients, and of what sums of them take, at the peak."""
        return self.step.kinds.get("gradients", 0) if self.step.bytes >= self.at_the_end else self.at_the_end

    @property
    def activations(self) -> dict[str, int]:
        """Bytes of activations and temporary tensors at the peak, by what makes them."""
        if self.step.bytes < self.at_the_end:
            return {}
        return {label: size for label, size in self.step.kinds.items() if label != "gradients"}

    @property
    def when(self) -> str:
        """The action in which the peak is."""
        return self.step.action if self.step.bytes >= self.at_the_end else "sums of gradients"


@attrs.frozen(kw_only=True)
class Plan:
    """What a recipe needs on some ranks of a device: memory by pipeline rank, and the time of a step."""

    device: DeviceModel
    mesh: PlannedMesh
    program: Program
    rows: Rows
    microbatches: int
    layers: int
    elements: Mapping[int, Elements]
    costs: Mapping[int, StageCosts]
    table: CostTable
    memory: Sequence[RankMemory]
    time: StepTime
    tokens: int
    flops: float | None
    peak_flops: float
    steps: int | None

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.mesh.layout.world_size

    @property
    def peak_memory_bytes(self) -> list[int]:
        """The peak of each rank: ranks that differ in data, context or tensors alone need the same."""
        each = self.ranks // len(self.memory)
        return [rank.peak for rank in self.memory for _ in range(each)]

    @property
    def fits(self) -> bool:
        """Whether every rank has enough memory, where that of the device is known."""
        return not self.device.memory or max(self.peak_memory_bytes) <= self.device.memory

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.tokens / self.time.seconds

    @property
    def mfu(self) -> float | None:
        """As `metrics.utilization` counts it, if the model counts its operations."""
        if self.flops is None:
            return None
        return self.flops / self.time.seconds / self.ranks / self.peak_flops


@attrs.frozen(eq=False)
class PlanCache:
    """
    What plans of one recipe have in common, if they differ in mesh, sizes, schedule and recomputation alone.

    `views` are those of ranks, by mesh, and by the ranks and the layers of stages. Whether shards are reduced early
    must follow from the mesh. `known` is what else all of them have in common.
    """

    recordings: Recordings = attrs.field(factory=dict)
    views: dict[Hashable, list[RankView]] = attrs.field(factory=dict)
    known: dict[str, Any] = attrs.field(factory=dict)

    def once(self, what: str, find: Callable[[], T]) -> T:
        """What `find` gives for the first of the plans: it is the same for all, and takes long to find."""
        if what not in self.known:
            self.known[what] = find()
        found: T = self.known[what]
        return found


class TooLarge(UserError):
    """A rank has more all the time than its device has memory, `bytes` of it."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a rank holds {size:,} bytes besides activations", 2)
        self.bytes = size


def plan(
    recipe: Recipe,
    device: DeviceModel,
    ranks: int | None = None,
    cache: PlanCache | None = None,
    schedule: Schedule | None = None,
) -> Plan:
    """
    The plan of a recipe for a device; without `ranks`, for as many as its mesh has at least.

    A `schedule` takes the place of the recipe's. With a `cache` of plans of the same recipe it is made faster; then
    TooLarge is raised where parameters alone do not fit. Raises RecipeError for a recipe with errors, and UserError for
    one that can't be planned.
    """
    nodes = Nodes.of(recipe)
    mesh = PlannedMesh.of(nodes.mesh_settings, ranks or nodes.least_ranks)
    with opened(nodes, device, mesh, schedule) as planned:
        if cache is None:
            return planned.plan()
        planned.cache, planned.at_most = cache, device.memory
        return planned.plan()


@contextmanager
def opened(
    nodes: Nodes, device: DeviceModel, mesh: PlannedMesh, schedule: Schedule | None = None
) -> Iterator["Planner"]:
    """A planner whose model, loss and kernels are open."""
    kind = "cuda" if device.is_gpu else "cpu"
    given: dict[str, Any] = {nodes.mesh: mesh, **dict.fromkeys(nodes.devices, PlannedDevice(torch.device(kind)))}
    given |= dict.fromkeys(nodes.unneeded_tokenizers)
    if schedule is not None:
        given[nodes.schedule] = schedule
    with nodes.recipe.open(nodes.needed_by_stages, given) as objects:
        yield Planner(nodes, device, mesh, {**objects, **given})


@attrs.define(eq=False)
class Planner:
    """Plans with the objects of a recipe that are open, for a mesh."""

    nodes: Nodes
    device: DeviceModel
    mesh: PlannedMesh
    objects: Mapping[str, Any]
    cache: PlanCache = attrs.field(factory=PlanCache)
    at_most: int = 0

    def plan(self) -> Plan:
        """The plan of all ranks."""
        schedule = self.objects[self.nodes.schedule]
        if embeds_on_every_rank(schedule):
            text = "a plan does not know of embedding and head on every rank; that with schedule.use = "
            raise UserError(f'{self.nodes.schedule}: {text}"pipeline.schedules.looped_bfs" has the same layers', 2)
        rows, microbatches = self.nodes.microbatches(self.mesh)
        try:
            program = schedule.program(self.mesh.sizes.pipeline, microbatches)
        except Deadlock as deadlock:
            raise UserError(f"{self.nodes.schedule} can't be executed: {deadlock}") from deadlock
        views = self._views(program)
        most = max(sum(size for kind, size in view.kept.items() if kind != "gradients") for view in views)
        if self.at_most and most > self.at_most:
            raise TooLarge(most)
        costs = self._costs(views, program, rows)
        program = with_whole_backwards(program)
        memory = [self._memory(view, index, program, costs) for index, view in enumerate(views)]
        precision = self.objects[self.nodes.precision]
        of_documents = self._rows(rows)
        tokens = self.nodes.global_size * self.nodes.length
        exchanges = [view.exchange(self.device) for view in views]
        table = cost_table(costs, exchanges, self._message(costs))
        frozen = set[str]().union(*(view.frozen for view in views))
        return Plan(
            device=self.device,
            mesh=self.mesh,
            program=program,
            rows=of_documents,
            microbatches=microbatches,
            layers=self._layers,
            elements={stage: each for view in views for stage, each in view.elements.items()},
            costs=costs,
            table=table,
            memory=memory,
            time=step_time(program, table, costs, exchanges, self._has_reference),
            tokens=tokens,
            flops=_flops(self._counted, tokens, of_documents, frozen),
            peak_flops=self.device.peaks.get(products_in(precision.compute), math.nan),
            steps=self.nodes.steps,
        )

    @property
    def _has_reference(self) -> bool:
        """Whether a step has forward passes without adapters, with which the loss compares the model."""
        loss = self.objects[self.nodes.loss]
        return isinstance(loss, Referenced) and loss.reference == "adapters"

    @property
    def _layers(self) -> int:
        layers: int = self.objects[self.nodes.model].num_hidden_layers
        return layers

    def _rows(self, count: int) -> Rows:
        """The rows of a microbatch."""
        # A store of many shards may be opened for it.
        document = self.cache.once("document length", lambda: self.nodes.document_length)
        return Rows(count, self.nodes.length, document)

    def _attended(self, rows: Rows) -> Attended:
        """What attention looks at: cuDNN computes whole rows that are all here, unless the recipe names another."""
        if not self.device.is_gpu:
            return attrs.evolve(attended(self._counted, Rows(rows.count, rows.length), 1.0), packed=0.0)
        captured = bool(self.nodes.settings(self.nodes.stages).get("capture")) and rows.document < math.inf
        by_cudnn = self.nodes.attention in ("auto", "cudnn") and self.mesh.sizes.context == 1 and not captured
        return attended(self._counted, rows, rows.whole * by_cudnn)

    @cached_property
    def _counted(self) -> ForwardFlops | None:
        """The operations of the model, if it counts them."""
        if not self.nodes.counts_flops:
            return None
        model: CountsFlops = self.objects[self.nodes.model]
        return self.cache.once("operations", model.forward_flops)  # takes as long as to build the model

    def _views(self, program: Program) -> list[RankView]:
        schedule = self.objects[self.nodes.schedule]
        cuts = isinstance(schedule, PartitioningSchedule)
        sizes = tuple(schedule.layers_by_stage(program.ranks, self._layers)) if cuts else ()
        key = self.mesh.sizes, program.stage_to_rank, sizes
        if key not in self.cache.views:
            self.cache.views[key] = [self._of_rank(index, program) for index in range(self.mesh.sizes.pipeline)]
        return self.cache.views[key]

    def _of_rank(self, index: int, program: Program) -> "RankView":
        mesh = self.mesh.at(index)
        given = {**self.objects, self.nodes.mesh: mesh}
        container = self.nodes.recipe.project.container(
            self.nodes.recipe.graph, self.nodes.stages, *self.nodes.memory_users, replacements=given
        )
        container.build()
        stages = container[self.nodes.stages]
        stages.outline()
        users = [container[name] for name in self.nodes.memory_users]
        kept = {str(kind): size for kind, size in memory_by_kind(users).items()}
        return RankView(mesh, stages, kept, sum(each.update_flops() for each in users if isinstance(each, UpdateFlops)))

    def _costs(self, views: Sequence["RankView"], program: Program, rows: int) -> dict[int, StageCosts]:
        model, loss = self.objects[self.nodes.model], self.objects[self.nodes.loss]
        stages, sizes = self.nodes.settings(self.nodes.stages), self.mesh.sizes.settings()
        meter = StageMeter(
            loss=loss,
            batch_type=self.nodes.batch_type,
            blocks=model.blocks,
            rows=rows,
            length=self.nodes.length,
            context=self.mesh.context_group,
            gradient=self.objects[self.nodes.precision].gradient,
            device=self.device.without_host() if stages.get("capture") else self.device,
            links=lambda dimension: link(self.mesh, self.device, dimension),
            attended=self._attended(self._rows(rows)),
            known_by=tuple((sizes[name], link(self.mesh, self.device, name)) for name in WITHIN_STAGES),
            recordings=self.cache.recordings,
        )
        recompute = stages["recompute"]
        parts = {int(stage) for stage in set(program.stage[program.op >= 2].tolist())}
        every = sorted((stage for view in views for stage in view.stages.local), key=lambda stage: stage.index)
        policies = program.recompute or (recompute,) * program.stages
        each = [attrs.evolve(stage, recompute=policies[stage.index]) for stage in every]  # a view may be of others
        return {stage.index: meter.costs(stage, stage.index in parts) for stage in each}

    def _memory(self, view: "RankView", index: int, program: Program, costs: Mapping[int, StageCosts]) -> RankMemory:
        kept = {kind: size for kind, size in view.kept.items() if kind != "gradients"}
        gradients = {stage.index: view.gradient_bytes(stage, program.microbatches) for stage in view.stages.local}
        peak = peak_of(program, index, costs, gradients)
        end = view.kept.get("gradients", 0) + view.summed_bytes()
        return RankMemory(
            stages=[stage.index for stage in view.stages.local],
            kept=kept,
            gradients=view.kept.get("gradients", 0),
            whole_gradients=sum(gradients.values()),
            step=peak,
            buffers=view.buffers(costs, self.device, self._batch_bytes(program.microbatches)),
            at_the_end=end,
        )

    def _message(self, costs: Mapping[int, StageCosts]) -> float:
        """How long what a stage gives is on its way to the next."""
        return max(each.sent for each in costs.values()) / link(self.mesh, self.device, PipelineDimension.name)

    def _batch_bytes(self, microbatches: int) -> int:
        """Tokens, targets, positions and documents, each int64, and weights, float32."""
        rows, _ = self.nodes.microbatches(self.mesh)
        return microbatches * rows * self.nodes.length // self.mesh.sizes.context * (4 * 8 + 4)


def _flops(counted: ForwardFlops | None, tokens: int, rows: Rows, frozen: set[str]) -> float | None:
    if counted is None:
        return None
    pairs = {window: tokens / rows.length * rows.pairs(window) for window in counted.per_pair}
    return counted.of_training(tokens, pairs, frozen)
