"""Planner for a recipe: estimates every rank's memory and the step time without processes, memory or data."""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import attrs
import torch

from drawloom import Recipe, UserError, internal
from drawloom.components.distributed.device_model import DeviceModel, Link, get_matmul_dtype_key
from drawloom.components.distributed.planned import PlannedDevice, PlannedMesh
from drawloom.components.parallel.dimensions import DIMENSIONS
from drawloom.components.parallel.pipeline import PipelineDimension
from drawloom.components.pipeline.program.lowering import merge_split_backwards
from drawloom.components.pipeline.program.timing import CostTable, DeadlockError
from drawloom.components.planning.attention import AttentionFractions, MicrobatchRows, estimate_attention_fractions
from drawloom.components.planning.memory_choice import (
    HOST_FRACTIONS,
    MemoryChoiceSearch,
    RankBytes,
    StatePlacement,
    list_policies,
)
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.rank_view import ElementCounts, RankView
from drawloom.components.planning.run_length import RunLength
from drawloom.components.planning.stage_costs import Recordings, StageCostRecorder, StageCosts
from drawloom.components.planning.step_time import (
    CONTENTION,
    CONTENTION_OF_COPIES,
    ReplicaTimes,
    StepTime,
    build_cost_table,
    estimate_step_time,
)
from drawloom.components.planning.timeline import Peak, compute_peak_host_bytes, compute_peak_memory
from drawloom.ports import (
    CountsFlops,
    Device,
    ForwardFlops,
    FrozenModel,
    HostMemoryUser,
    Kernels,
    Loss,
    MemoryChoice,
    MemoryPolicy,
    MemoryUser,
    Mesh,
    PartitioningSchedule,
    PerDimension,
    Precision,
    Program,
    Recompute,
    Referenced,
    Schedule,
    Stages,
    UpdateArithmetic,
    UpdateFlops,
    count_flops_with_loss,
    embeds_on_every_rank,
    sum_memory_by_kind,
)

T = TypeVar("T")

WITHIN_STAGES = [dimension.name for dimension in DIMENSIONS if dimension.splits_work]
"""Mesh dimensions along which ranks exchange activations inside of a stage."""


@attrs.frozen
class RankMemory:
    """
    Bytes on a pipeline rank: persistent bytes by kind, buffers by kind, and the peak within a step.

    Gradients belong to the step: the first backward pass allocates them, and the update frees them. During
    backward passes the gradients of sharded parameters (FSDP, ZeRO) may be whole: then they take `whole_gradients`.
    `final_peak` is the bytes for gradients and their reduction when the step ends. `host` are the bytes for optimizer
    state and waiting activations in host memory.
    """

    stages: Sequence[int]
    persistent: Mapping[str, int]
    gradients: int
    whole_gradients: int
    step: Peak
    buffers: Mapping[str, int]
    final_peak: int
    host: int

    @property
    def peak_bytes(self) -> int:
        """Return the peak bytes: during the passes, or at the step's end when gradients are reduced."""
        return sum(self.persistent.values()) + sum(self.buffers.values()) + max(self.step.bytes, self.final_peak)

    @property
    def peak_gradient_bytes(self) -> int:
        """Return the bytes for gradients and their reduction buffers at the peak."""
        return self.step.kinds.get("gradients", 0) if self.step.bytes >= self.final_peak else self.final_peak

    @property
    def activation_bytes_at_peak(self) -> dict[str, int]:
        """Return the bytes for activations and temporary tensors at the peak, by label."""
        if self.step.bytes < self.final_peak:
            return {}
        return {label: size for label, size in self.step.kinds.items() if label != "gradients"}

    @property
    def action_at_peak(self) -> str:
        """Return the name of the action at the peak."""
        return self.step.action if self.step.bytes >= self.final_peak else "sums of gradients"


@attrs.frozen(kw_only=True)
class Plan:
    """
    Estimate for a recipe on a device: memory by pipeline rank, and the step time.

    `choice` is a memory policy's, and `kept_seconds` the step time with unlimited memory; both are None if settings
    decide.
    """

    device: DeviceModel
    mesh: PlannedMesh
    program: Program
    rows: MicrobatchRows
    microbatches: int
    layers: int
    elements: Mapping[int, ElementCounts]
    costs: Mapping[int, StageCosts]
    table: CostTable
    memory: Sequence[RankMemory]
    time: StepTime
    exchanges: Sequence[ReplicaTimes]
    tokens: int
    flops: float | None
    peak_flops: float
    choice: MemoryChoice | None = None
    kept_seconds: float | None = None
    length: RunLength | None = None

    @property
    def ranks(self) -> int:
        """Return the number of ranks in the mesh."""
        return self.mesh.layout.world_size

    @property
    def peak_memory_bytes(self) -> list[int]:
        """Return the peak bytes of every rank in the mesh; ranks with the same stages have the same peak."""
        copies = self.ranks // len(self.memory)
        return [rank.peak_bytes for rank in self.memory for _ in range(copies)]

    @property
    def peak_bytes(self) -> int:
        """Return the peak bytes of the rank with the highest peak."""
        return max(rank.peak_bytes for rank in self.memory)

    @property
    def fits(self) -> bool:
        """Return whether every rank fits the memory of the device and the host, as far as they are known."""
        device, host = self.device.memory, self.device.host_memory
        fits_device = not device or self.peak_bytes <= device
        return fits_device and (not host or max(rank.host for rank in self.memory) <= host)

    @property
    def tokens_per_second(self) -> float:
        """Return tokens per second over all ranks."""
        return self.tokens / self.time.seconds

    @property
    def mfu(self) -> float | None:
        """Return the model FLOPs utilization like `metrics.utilization`, or None if the model does not count FLOPs."""
        if self.flops is None:
            return None
        return self.flops / self.time.seconds / self.ranks / self.peak_flops


@attrs.frozen(eq=False)
class PlanCache:
    """
    Results shared by a recipe's plans, which differ only in mesh, sizes, schedule and recomputation.

    `views` are rank views by mesh and by the stages' ranks and layers; whether gradients are reduced in every
    microbatch must follow from the mesh. `values` are the results common to all plans, by name.
    """

    recordings: Recordings = attrs.field(factory=dict)
    views: dict[Hashable, list[RankView]] = attrs.field(factory=dict)
    values: dict[str, Any] = attrs.field(factory=dict)

    def get_or_compute(self, name: str, compute: Callable[[], T]) -> T:
        """Return the cached value with this name, or compute and cache it."""
        if name not in self.values:
            self.values[name] = compute()
        value: T = self.values[name]
        return value


class TooLargeError(UserError):
    """Error for a rank whose persistent bytes exceed its device's memory."""

    def __init__(self, size: int) -> None:
        super().__init__(f"a rank holds {size:,} bytes besides activations", 2)
        self.bytes = size


DEVICE_FRACTION = 0.92
"""Fraction of a device's memory that a memory policy plans for; CUDA's context and fragmentation need the rest."""


@attrs.define
class FixedMemory:
    """Memory policy with a given choice."""

    choice: MemoryChoice

    def choose(self) -> MemoryChoice:
        return self.choice


def plan(
    recipe: Recipe,
    device: DeviceModel,
    ranks: int | None = None,
    cache: PlanCache | None = None,
    schedule: Schedule | None = None,
) -> Plan:
    """
    Plan a recipe for a device; `ranks` defaults to the smallest number its mesh allows.

    A `schedule` replaces the recipe's. A `cache` shared by a recipe's plans makes planning faster. Raises RecipeError
    for recipes with errors, UserError if planning is impossible, and, with a cache, TooLargeError if parameters alone
    do not fit.
    """
    nodes = Nodes.from_recipe(recipe)
    settings = nodes.settings(Mesh)
    smallest = math.prod(PerDimension.from_settings(settings).without_expert_dimensions().values())
    mesh = PlannedMesh.from_settings(settings, ranks or smallest)
    kind = "cuda" if device.is_gpu else "cpu"
    replacements: dict[str, Any] = {
        nodes.mesh_node: mesh,
        **dict.fromkeys(nodes.find_nodes(Device), PlannedDevice(torch.device(kind))),
        # The planner makes the choice itself, and each rank's view has its own.
        **dict.fromkeys(nodes.find_nodes(MemoryPolicy), FixedMemory(MemoryChoice.keep_all(0, 0))),
        **dict.fromkeys(nodes.tokenizer_nodes_to_omit),
    }
    if schedule is not None:
        replacements[nodes.schedule_node] = schedule
    with recipe.open(nodes.nodes_needed_by_stages, replacements) as objects:
        limit = 0 if cache is None else device.memory
        return Planner(nodes, device, mesh, {**objects, **replacements}, cache or PlanCache(), limit).plan()


@attrs.define(eq=False)
class Planner:
    """Planner for one mesh, with a recipe's open objects."""

    nodes: Nodes
    device: DeviceModel
    mesh: PlannedMesh
    objects: Mapping[str, Any]
    cache: PlanCache
    memory_limit: int
    frozen_model_bytes_per_microbatch: int = internal(0)  # on the last stage's rank

    def plan(self) -> Plan:
        """Plan the recipe on this mesh. Raises UserError if impossible, TooLargeError above `memory_limit`."""
        schedule = self.objects[self.nodes.schedule_node]
        if embeds_on_every_rank(schedule):
            text = "a plan does not support embedding and head on every rank; plan with schedule.use = "
            raise UserError(f'{self.nodes.schedule_node}: {text}"pipeline.schedules.looped_bfs" has the same layers', 2)
        rows, microbatches = self.nodes.count_rows_and_microbatches(self.mesh)
        try:
            program = schedule.program(self.mesh.sizes.pipeline, microbatches)
        except DeadlockError as deadlock:
            raise UserError(f"{self.nodes.schedule_node} can't be executed: {deadlock}") from deadlock
        if self.nodes.find_nodes(MemoryPolicy):
            return self._plan_with_memory_policy(program, rows)
        views = self._build_rank_views(program)
        self._check_persistent_bytes(views)
        stages = self.nodes.settings(Stages)
        policies = program.recompute or (stages["recompute"],) * program.stages
        costs = self._record_stage_costs(views, program, rows, policies)
        if self.nodes.has_feature("pipeline.offloaded"):
            program = attrs.evolve(program, offloaded=frozenset(range(program.stages)))
        return self._build_plan_from_costs(views, merge_split_backwards(program), rows, costs)

    def _plan_with_memory_policy(self, program: Program, rows: int) -> Plan:
        """Plan the fastest fitting choice of recomputation, offloading and memory for the state, or the smallest."""
        limits = self.nodes.settings(MemoryPolicy)
        memory = min(limits["limit"] or DEVICE_FRACTION * self.device.memory, self.device.memory or math.inf)
        host_memory = int(limits["host_limit"] or self.device.host_memory)
        self.device = attrs.evolve(self.device, memory=int(memory), host_memory=host_memory)
        views = self._build_rank_views(program)
        places = [self._list_state_placements(view) for view in views]
        self._check_persistent_bytes([view for placed in places for view, _ in placed[-1:]])
        merged = merge_split_backwards(program)
        keeps_all = MemoryChoice.keep_all(program.stages, program.ranks)
        kept_costs = self._record_stage_costs(views, program, rows, keeps_all.recompute)
        kept = self._build_plan_from_costs(views, merged, rows, kept_costs)
        kept = attrs.evolve(kept, choice=keeps_all, kept_seconds=kept.time.seconds)
        if kept.fits:
            return kept
        compiled = self.nodes.has_feature("stages.compiled")
        costs_by_policy: dict[Recompute, Mapping[int, StageCosts]] = {
            policy: kept_costs
            if policy == "none"
            else self._record_stage_costs(views, program, rows, (policy,) * program.stages)
            for policy in list_policies(limits["quantize"], compiled)
        }

        def count_bytes(rank: int, whole: Program, costs: Mapping[int, StageCosts]) -> RankBytes:
            """Count a rank's bytes on the device and in host memory."""
            memory = self._estimate_rank_memory(views[rank], rank, whole, costs)
            return RankBytes(memory.peak_bytes, memory.host)

        choice = MemoryChoiceSearch(
            program=merged,
            costs=costs_by_policy,
            build_table=lambda costs: self._build_cost_table(views, costs),
            count_bytes=count_bytes,
            placements=[[placement for _, placement in placed] for placed in places],
            limit=self.device.memory,
            host_limit=self.device.host_memory,
            may_offload_activations=self.nodes.may_offload_activations,
        ).choose()
        costs = {stage: costs_by_policy[policy][stage] for stage, policy in enumerate(choice.recompute)}
        chosen_views = [
            next(view for view, placement in placed if placement.host_fraction == fraction)
            for placed, fraction in zip(places, choice.host_states, strict=True)
        ]
        chosen = self._build_plan_from_costs(
            chosen_views, attrs.evolve(merged, offloaded=choice.offloaded), rows, costs
        )
        return attrs.evolve(chosen, choice=choice, kept_seconds=kept.time.seconds)

    def _list_state_placements(self, view: RankView) -> list[tuple[RankView, StatePlacement]]:
        """Return a rank's views and placements by the fraction of its optimizer state in host memory."""
        fractions = HOST_FRACTIONS if self.nodes.lets_policy_place_optimizer_state else HOST_FRACTIONS[:1]
        views = [(fraction, view.with_state_on_host(fraction)) for fraction in fractions]
        return [
            (
                moved,
                StatePlacement(
                    fraction,
                    saved=sum(view.bytes_by_kind.values()) - sum(moved.bytes_by_kind.values()),
                    host=moved.host_bytes,
                    seconds=moved.estimate_sync_and_update_times(self.device).update.planned,
                ),
            )
            for fraction, moved in views
        ]

    def _check_persistent_bytes(self, views: Sequence[RankView]) -> None:
        """Raise TooLargeError if a rank's persistent bytes exceed `memory_limit`."""
        persistent = max(sum(_select_persistent_bytes_by_kind(view).values()) for view in views)
        if self.memory_limit and persistent > self.memory_limit:
            raise TooLargeError(persistent)

    def _build_cost_table(self, views: Sequence["RankView"], costs: Mapping[int, StageCosts]) -> CostTable:
        """Return the seconds for passes, messages and copies to host memory."""
        exchanges = [view.estimate_sync_and_update_times(self.device) for view in views]
        sent = max(stage_costs.sent for stage_costs in costs.values())
        message_seconds = self._find_link(PipelineDimension.name).estimate_seconds(sent)
        return build_cost_table(costs, exchanges, message_seconds, self.device.host_link)

    def _find_link(self, dimension: str) -> Link:
        """Return the link between ranks along a mesh dimension."""
        return self.device.find_link(self.mesh.group(dimension).ranks)

    def _build_plan_from_costs(
        self, views: Sequence["RankView"], program: Program, microbatch_rows: int, costs: Mapping[int, StageCosts]
    ) -> Plan:
        """Plan a program with merged backward passes, with these costs by stage."""
        memory = [self._estimate_rank_memory(view, index, program, costs) for index, view in enumerate(views)]
        precision = self.objects[self.nodes.find_only_node(Precision)]
        document_rows = self._build_microbatch_rows(microbatch_rows)
        tokens = self.nodes.global_batch_size * self.nodes.phase_row_growth.rows_per_row * self.nodes.sequence_length
        exchanges = [view.estimate_sync_and_update_times(self.device) for view in views]
        table = self._build_cost_table(views, costs)
        frozen = set[str]().union(*(view.frozen_names for view in views))
        forward, per_row = self._model_forward_flops, document_rows.count_expected_pairs_per_row
        windows = () if forward is None else forward.per_pair
        pairs = {window: tokens / document_rows.length * per_row(window) for window in windows}
        return Plan(
            device=self.device,
            mesh=self.mesh,
            program=program,
            rows=document_rows,
            microbatches=program.microbatches,
            layers=self.objects[self.nodes.model_node].num_hidden_layers,
            elements={stage: elements for view in views for stage, elements in view.elements_by_stage.items()},
            costs=costs,
            table=table,
            memory=memory,
            time=estimate_step_time(program, table, costs, exchanges, self._reference_forward_passes),
            exchanges=exchanges,
            tokens=tokens,
            flops=None if forward is None else forward.count_training_flops(tokens, pairs, frozen),
            peak_flops=self.device.peaks.get(get_matmul_dtype_key(precision.compute), math.nan),
        )

    @property
    def _reference_forward_passes(self) -> float:
        """Return a reference model's forward passes per microbatch, in passes of the trained model."""
        loss = self.objects[self.nodes.find_only_node(Loss)]
        if not isinstance(loss, Referenced) or loss.reference not in ("adapters", "model"):
            return 0.0
        if loss.reference == "adapters" or self._model_forward_flops is None:
            return 1.0
        models = [self.objects[name] for name in self.nodes.frozen_models_with_flops]
        counts = [sum(model.forward_flops().by_parameter.values()) for model in models]
        return sum(counts) / sum(self._model_forward_flops.by_parameter.values()) if counts else 1.0

    def _build_microbatch_rows(self, count: int) -> MicrobatchRows:
        """Return microbatch rows for the estimates: `count`, sequence length, and mean document length."""
        # The length may require opening a store of many shards.
        document = self.cache.get_or_compute("document length", lambda: self.nodes.mean_document_length)
        return MicrobatchRows(count, self.nodes.sequence_length, document)

    def _estimate_attention_fractions(self, rows: MicrobatchRows) -> AttentionFractions:
        """Estimate the attention fractions; cuDNN gets single-document rows, unless another kernel is configured."""
        if not self.device.is_gpu:
            fractions = estimate_attention_fractions(
                self._model_forward_flops, MicrobatchRows(rows.count, rows.length), 1.0
            )
            return attrs.evolve(fractions, packed=0.0)
        captured = self.nodes.has_feature("pipeline.captured") and rows.document < math.inf
        kernels = [self.nodes.graph.nodes[name].settings.get("attention") for name in self.nodes.find_nodes(Kernels)]
        by_cudnn = kernels[:1] in ([], [None], ["auto"], ["cudnn"]) and not captured
        return estimate_attention_fractions(
            self._model_forward_flops, rows, rows.all_rows_one_document_probability * by_cudnn
        )

    @cached_property
    def _model_forward_flops(self) -> ForwardFlops | None:
        """Return the model's forward FLOPs, or None if the model does not count them."""
        if self.nodes.model_node not in self.nodes.find_nodes(CountsFlops):
            return None
        model: CountsFlops = self.objects[self.nodes.model_node]
        loss = self.objects[self.nodes.find_only_node(Loss)]
        # it builds the model
        return self.cache.get_or_compute("operations", lambda: count_flops_with_loss(model, loss))

    def _build_rank_views(self, program: Program) -> list[RankView]:
        """Return the views by pipeline rank, from the cache if another plan has the same partition."""
        schedule = self.objects[self.nodes.schedule_node]
        cuts = isinstance(schedule, PartitioningSchedule)
        layers = self.objects[self.nodes.model_node].num_hidden_layers
        sizes = tuple(schedule.layers_by_stage(program.ranks, layers)) if cuts else ()
        key = self.mesh.sizes, program.stage_to_rank, sizes
        if key not in self.cache.views:
            self.cache.views[key] = [
                self._build_rank_view(index, program.stages) for index in range(self.mesh.sizes.pipeline)
            ]
        return self.cache.views[key]

    def _build_rank_view(self, index: int, stage_count: int) -> "RankView":
        """Build a pipeline rank's stages on the meta device, and sum its memory by kind."""
        mesh = self.mesh.seen_from_pipeline_rank(index)
        policy = FixedMemory(MemoryChoice.keep_all(stage_count, self.mesh.sizes.pipeline))
        policies = dict.fromkeys(self.nodes.find_nodes(MemoryPolicy), policy)
        replacements = {**self.objects, self.nodes.mesh_node: mesh, **policies}
        container = self.nodes.recipe.project.container(
            self.nodes.recipe.graph,
            self.nodes.stages_node,
            *self.nodes.find_nodes(MemoryUser),
            replacements=replacements,
        )
        container.build()
        stages = container[self.nodes.stages_node]
        stages.build_meta_stages()
        frozen = [container[name] for name in self.nodes.find_nodes(FrozenModel)]
        for model in frozen:
            model.build_meta_stages()
        users = [container[name] for name in self.nodes.find_nodes(MemoryUser)]

        def count_bytes_on_host(fraction: float) -> tuple[dict[str, int], int]:
            """Return the bytes by kind, and in host memory, with a fraction of the state there."""
            policy.choice = attrs.evolve(policy.choice, host_states=(fraction,) * self.mesh.sizes.pipeline)
            sizes = {str(kind): size for kind, size in sum_memory_by_kind(users).items()}
            return sizes, sum(user.host_bytes() for user in users if isinstance(user, HostMemoryUser))

        sizes, host_bytes = count_bytes_on_host(0.0)
        update_flops = sum(user.count_update_flops() for user in users if isinstance(user, UpdateFlops))
        arithmetic = sum(
            user.count_elementwise_flops_per_update() for user in users if isinstance(user, UpdateArithmetic)
        )
        return RankView(
            mesh=mesh,
            stages=stages,
            bytes_by_kind=sizes,
            host_bytes=host_bytes,
            count_bytes_on_host=count_bytes_on_host,
            update_flops=update_flops,
            update_arithmetic=arithmetic,
            contention=CONTENTION_OF_COPIES if self.nodes.has_feature("overlap.shard_copies") else CONTENTION,
            frozen_model=next(iter(frozen), None),
        )

    def _record_stage_costs(
        self, views: Sequence["RankView"], program: Program, rows: int, policies: Sequence[Recompute]
    ) -> dict[int, StageCosts]:
        """Record every stage's passes on the meta device, with a recompute policy each; return the costs by stage."""
        model, loss = self.objects[self.nodes.model_node], self.objects[self.nodes.find_only_node(Loss)]
        captured, sizes = self.nodes.has_feature("pipeline.captured"), self.mesh.sizes.settings()
        meter = StageCostRecorder(
            loss=loss,
            batch_type=self.nodes.batch_type,
            blocks=model.blocks,
            rows=rows,
            length=self.nodes.sequence_length,
            context=self.mesh.context_group,
            gradient=self.objects[self.nodes.find_only_node(Precision)].gradient,
            device=self.device.without_host_time() if captured else self.device,
            links=self._find_link,
            fractions=self._estimate_attention_fractions(self._build_microbatch_rows(rows)),
            cache_key=tuple((sizes[name], self._find_link(name)) for name in WITHIN_STAGES),
            recordings=self.cache.recordings,
            frozen_model=views[-1].frozen_model,
        )
        split_stages = {int(stage) for stage in set(program.stage[program.op >= 2].tolist())}
        all_stages = sorted((stage for view in views for stage in view.stages.local), key=lambda stage: stage.index)
        # A cached view may have been made with other policies.
        recomputing = [attrs.evolve(stage, recompute=policies[stage.index]) for stage in all_stages]
        costs = {stage.index: meter.record_costs(stage, stage.index in split_stages) for stage in recomputing}
        self.frozen_model_bytes_per_microbatch = meter.frozen_model_bytes_per_microbatch
        return costs

    def _estimate_rank_memory(
        self, view: "RankView", index: int, program: Program, costs: Mapping[int, StageCosts]
    ) -> RankMemory:
        """Return a pipeline rank's memory: persistent bytes, peak, and buffers."""
        gradients = {
            stage.index: view.gradient_bytes_in_backward(stage, program.microbatches) for stage in view.stages.local
        }
        captured = self.nodes.has_feature("pipeline.captured")
        kept = {stage: captured * size for stage, size in view.whole_gradient_bytes_by_stage.items()}
        peak = compute_peak_memory(program, index, costs, gradients, kept)
        rows, _ = self.nodes.count_rows_and_microbatches(self.mesh)
        tokens = program.microbatches * rows * self.nodes.sequence_length // self.mesh.sizes.context
        # Batches have tokens, targets, positions and documents (int64), and weights (float32).
        buffers = view.buffer_bytes_by_kind(costs, self.device, tokens * (4 * 8 + 4))
        if self.frozen_model_bytes_per_microbatch and view.stages.local[-1].span.head:
            buffers["reference"] = program.microbatches * self.frozen_model_bytes_per_microbatch
        return RankMemory(
            stages=[stage.index for stage in view.stages.local],
            persistent=_select_persistent_bytes_by_kind(view),
            gradients=view.bytes_by_kind.get("gradients", 0),
            whole_gradients=sum(gradients.values()),
            step=peak,
            buffers=buffers,
            final_peak=view.bytes_by_kind.get("gradients", 0) + view.reduction_buffer_bytes(),
            host=view.host_bytes + view.stages.feature_host_bytes + compute_peak_host_bytes(program, index, costs),
        )


def _select_persistent_bytes_by_kind(view: RankView) -> dict[str, int]:
    """Return a rank's persistent bytes by kind: all but gradients."""
    return {kind: size for kind, size in view.bytes_by_kind.items() if kind != "gradients"}
