"""
Sources of stage costs: given units, a plan, or a traced step.

A traced step's timeline has every pipeline action's start and end.
"""

import gzip
import json
import re
from bisect import bisect_left
from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import attrs
import numpy as np

from drawloom import Recipe, UserError, internal
from drawloom.components.distributed.device_model import DeviceModel
from drawloom.components.parallel.pipeline import PipelineDimension
from drawloom.components.pipeline.program.builders import assign_stages_in_loop
from drawloom.components.pipeline.program.list_scheduling import FORWARDS_FIRST, SchedulingTask, build_list_schedule
from drawloom.components.pipeline.program.lowering import merge_split_backwards
from drawloom.components.pipeline.program.partition import partition_evenly
from drawloom.components.pipeline.program.recomputation import estimate_recomputed_forward_fraction
from drawloom.components.pipeline.program.timing import Costs, CostTable, Floats, index_produced_and_consumed_results
from drawloom.components.pipeline.runtime.p2p import WAIT
from drawloom.components.pipeline.simulation.simulator import Simulation
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import Plan, PlanCache, RankMemory, plan
from drawloom.components.planning.stage_costs import Passes
from drawloom.components.planning.timeline import compute_peak_memory
from drawloom.components.storage.durable_files import open_regular_file
from drawloom.ports import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OPS, Program, Recompute, Stages

ACTION = re.compile(r"\d+[FBIW]\d+")
FILE = re.compile(r"steps-(\d+)-(\d+)-rank-(\d+)\.json\.gz")
STEP = re.compile(r"step \d+")
Span = tuple[float, float]
"""Start and end, in seconds."""


@attrs.frozen(eq=False)
class TracedStep:
    """Traced step: the program, and its actions' start and end in seconds, both of shape (actions,)."""

    program: Program
    start: Floats
    end: Floats

    @property
    def simulation(self) -> Simulation:
        """Return the step as a simulation, for drawings and summaries."""
        return Simulation(self.program, Costs(), "free", self.start, self.end)

    def compute_cost_table(self) -> CostTable:
        """
        Return the median seconds of every stage's ops, and the minimum seconds between a result and its use.

        If a stage's backward passes were not split, their time counts half as I and half as W.
        """
        lengths = np.full((self.program.stages, len(OPS)), np.nan)
        for stage, op in {*zip(self.program.stage.tolist(), self.program.op.tolist(), strict=True)}:
            chosen = (self.program.stage == stage) & (self.program.op == op)
            lengths[stage, op] = np.median((self.end - self.start)[chosen])
        whole, inputs, weights = (lengths[:, op] for op in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT))
        whole[:] = np.where(np.isnan(whole), inputs + weights, whole)
        for part in (inputs, weights):
            part[:] = np.where(np.isnan(part), whole / 2, part)
        return CostTable(comm=self._min_message_seconds(), lengths=lengths)

    def _min_message_seconds(self) -> float:
        """Return the minimum seconds between a result and its use on another rank; 0 without messages."""
        produces, consumes, delay = index_produced_and_consumed_results(self.program, Costs(comm=1.0))
        ready = np.zeros(int(produces.max(initial=0)) + 1)
        ready[produces] = self.end
        between = self.start - ready[consumes]
        return max(0.0, float(between[delay > 0].min(initial=np.inf))) if (delay > 0).any() else 0.0


def read_traced_step(folder: Path, program: Program) -> TracedStep:
    """
    Return the last step in the newest trace of a run with this program.

    Among ranks with the same stages, the first rank is read. Raises UserError if there is no trace, or if the trace
    belongs to another program.
    """
    program = merge_split_backwards(program)
    paths = find_newest_trace_files(folder, program.ranks)
    ranks = [_read_last_step_action_spans(paths[rank * len(paths) // program.ranks]) for rank in range(program.ranks)]
    spans: list[Span] = []
    for rank, actions in enumerate(ranks):
        for row in range(*program.bounds[rank : rank + 2]):
            if (name := str(program.action(row))) not in actions:
                text = f"has no {name} on rank {rank} of the pipeline"
                raise UserError(f"{folder}: its trace {text}, so it belongs to another recipe; trace the run again")
            spans.append(actions[name])
    times = np.array(spans) - min(start for start, _ in spans)
    return TracedStep(program, times[:, 0], times[:, 1])


def find_newest_trace_files(folder: Path, multiple: int) -> Sequence[Path]:
    """Return the newest complete trace's files by rank; their number is a multiple of the pipeline ranks."""
    traces: dict[tuple[int, int], dict[int, Path]] = {}
    for path in (folder / "traces").glob("*.json.gz"):
        if match := FILE.fullmatch(path.name):
            first, last, rank = map(int, match.groups())
            traces.setdefault((last, first), {})[rank] = path
    if not traces:
        text = "it has no traces; let its recipe extend with_profiler, or add the node listeners.profiler"
        raise UserError(f"{folder}: {text}, and run some steps", 2)
    # A run that was killed while it wrote a trace leaves files of some ranks only.
    most = max(map(len, traces.values()))
    newest = traces[max(steps for steps, files in traces.items() if len(files) == most)]
    if most % multiple or max(newest) >= most:
        text = f"it has traces of rank {', '.join(map(str, sorted(newest)))} alone"
        raise UserError(f"{folder}: {text}; run some steps again until all ranks have written a trace", 2)
    return [newest[rank] for rank in sorted(newest)]


class TracedOperation(NamedTuple):
    """Operation on a GPU or, in a CPU's trace, of torch; `issued` is when the host began it."""

    issued: float
    span: Span
    name: str


@attrs.frozen
class Trace:
    """Named ranges of the host as (start, end, name), and operations, all sorted by time."""

    ranges: Sequence[tuple[float, float, str]]
    on_gpu: Sequence[TracedOperation]
    on_cpu: Sequence[TracedOperation]


def read_trace(path: Path) -> Trace:
    """Read a trace file. Raises UserError if it is not a trace."""
    try:
        with open_regular_file(path) as file, open(file.descriptor, "rb", closefd=False) as packed:
            trace = json.loads(gzip.decompress(packed.read()))
        base = trace.get("baseTimeNanoseconds", 0)
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        ranges, on_cpu = (
            sorted((*_compute_event_span(event, base), event["name"]) for event in events if event.get("cat") == kind)
            for kind in ("user_annotation", "cpu_op")
        )
        operations = [TracedOperation(begin, (begin, end), name) for begin, end, name in on_cpu]
        return Trace(ranges, _list_gpu_operations(events, base), operations)
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} can't be read as a trace: {error}; remove it, or trace the run again") from error


def _read_last_step_action_spans(path: Path) -> dict[str, Span]:
    """Return the spans of the last step's actions by name, without waits for messages; GPU time if the trace has it."""
    trace = read_trace(path)
    spans = trace.ranges
    launched = [operation for operation in trace.on_gpu if "nccl" not in operation.name.lower()]
    start = max((start for start, _, name in spans if STEP.fullmatch(name)), default=0.0)
    waits = [(begin, end) for begin, end, name in spans if name == WAIT and begin >= start]
    actions: dict[str, Span] = {}
    for begin, end, name in spans:
        # A validation in the same step comes later, and its forward passes have the same names.
        if begin >= start and name not in actions:
            actions[name] = _find_gpu_span(launched, begin, end) or (_find_start_after_waits(waits, begin, end), end)
    return actions


def _list_gpu_operations(events: Sequence[Mapping[str, Any]], base: int) -> list[TracedOperation]:
    """Return all GPU operations, sorted by their issue; none in a CPU trace."""
    issued = {
        event["args"]["correlation"]: _compute_event_span(event, base)[0]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    return sorted(
        TracedOperation(issued[event["args"]["correlation"]], _compute_event_span(event, base), event["name"])
        for event in events
        if event.get("cat") in ON_GPU and event["args"].get("correlation") in issued
    )


ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def _find_gpu_span(launched: Sequence[TracedOperation], begin: float, end: float) -> Span | None:
    """
    Return the span of the GPU operations issued during a host span, or None if there are none.

    torch's GPU ranges omit backward passes, because an autograd thread issues their operations.
    """
    first, last = (bisect_left(launched, moment, key=attrgetter("issued")) for moment in (begin, end))
    spans = [operation.span for operation in launched[first:last]]
    return (min(start for start, _ in spans), max(end for _, end in spans)) if spans else None


def _compute_event_span(event: Mapping[str, Any], base: int) -> Span:
    """Return an event's start and end in seconds."""
    # Nanoseconds since 1970 have more digits than a float; nanoseconds of a day do not.
    start = base % (86_400 * 10**9) / 1e9 + float(event["ts"]) / 1e6
    return start, start + float(event["dur"]) / 1e6


def _find_start_after_waits(waits: Sequence[Span], begin: float, end: float) -> float:
    """Return when an action's computation starts: the end of its waits."""
    return max((until for start, until in waits if begin <= start and until <= end), default=begin)


MIN_SLICE_SECONDS = 1e-9
"""The minimum seconds of a slice, and the resolution to which seconds are rounded."""

POLICIES: tuple[Literal["selective", "blocks"], ...] = ("selective", "blocks")
"""Recompute policies that slices offer to the schedule, besides every n-th block."""

MAX_ACTIVATIONS = 2
"""Memory limit, in activations of a microbatch in all layers: ZB-H2 keeps no more, and more memory does not help."""


class CostSource(Protocol):
    """
    Source for a model's costs in any partition into stages.

    A slice is the smallest part of a model that can be a stage, usually a layer. `sizes` are slice counts by
    stage; by default, stages are partitioned as in a run.
    """

    def stage_costs(
        self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None = None, recompute: Sequence[Recompute] = ()
    ) -> Costs:
        """Return the costs by stage, with a `recompute` policy per stage."""

    def peak_activation_bytes(self, program: Program, sizes: Sequence[int] | None = None) -> Sequence[int] | None:
        """Return the peak activation bytes by rank, or None if unknown."""
        return None

    def auto_schedule_settings(self, ranks: int) -> dict[str, Any]:
        """Return `pipeline.schedules.auto` settings for these costs."""


@attrs.frozen
class UnitCosts(CostSource):
    """Costs per rank in any unit, divided evenly among its stages."""

    given: Costs

    def stage_costs(
        self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None = None, recompute: Sequence[Recompute] = ()
    ) -> Costs:
        """Return the costs by stage; recomputation adds a forward pass fraction to the backward pass."""
        costs = self.given.divide_by_stages(stages_per_rank)
        if not recompute:
            return costs
        # (stages,): the forward time that the backward pass repeats.
        again = costs.forward * np.array([estimate_recomputed_forward_fraction(policy) for policy in recompute])
        zeros = np.zeros_like(again)  # (stages,), to repeat a number for every stage
        columns = [costs.forward + zeros, costs.backward + again, costs.backward_input + again]
        # Columns are ordered like OPS: F, B, I, W.
        return CostTable(**attrs.asdict(costs), lengths=np.stack([*columns, costs.backward_weight + zeros], axis=1))

    def auto_schedule_settings(self, ranks: int) -> dict[str, Any]:
        """Return the costs of a rank instead of slices; the schedule divides them evenly among its stages."""
        names = ["forward", "backward_input", "backward_weight", "comm", *["offload"] * bool(self.given.offload)]
        return {name: getattr(self.given, name) for name in names}


@attrs.frozen(eq=False)
class TracedCosts(CostSource):
    """Seconds of a traced step, redistributed evenly if the stage count differs from the traced one."""

    measured: TracedStep

    @cached_property
    def _cost_table_of_trace(self) -> CostTable:
        """The traced costs by stage and op."""
        return self.measured.compute_cost_table()

    def stage_costs(
        self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None = None, recompute: Sequence[Recompute] = ()
    ) -> Costs:
        """Return the costs by stage in seconds, including the traced run's recomputation."""
        return self._cost_table_of_trace.resample_to_sizes(sizes or (1,) * (ranks * stages_per_rank))

    def auto_schedule_settings(self, ranks: int) -> dict[str, Any]:
        """Return two slices per rank; a stage's costs besides its layers are not known."""
        return build_auto_schedule_slices(self._cost_table_of_trace.resample_to_sizes((1,) * (2 * ranks)))


@attrs.frozen
class FixedPartitionSchedule:
    """Schedule with split backward passes for stages with given sizes, recompute policies and ranks."""

    placement: tuple[int, ...]
    sizes: tuple[int, ...]
    recompute: tuple[Recompute, ...] = ()

    def stage_to_rank(self, ranks: int) -> tuple[int, ...]:
        """Return `placement`, whatever `ranks` is."""
        return self.placement

    def layers_by_stage(self, ranks: int, layers: int) -> tuple[int, ...]:
        """Return `sizes`, whatever `ranks` and `layers` are."""
        return self.sizes

    def program(self, ranks: int, microbatches: int) -> Program:
        """Return a program with forward passes as early as possible, with the given recompute policies."""
        activations = (1.0,) * len(self.placement)
        task = SchedulingTask(self.placement, microbatches, Costs(), activations, microbatches * sum(activations))
        return attrs.evolve(build_list_schedule(task, FORWARDS_FIRST), recompute=self.recompute)


@attrs.frozen(eq=False)
class PlannedCosts(CostSource):
    """Seconds and bytes from plans, made once for every partition into stages."""

    recipe: Recipe
    device: DeviceModel
    cache: PlanCache | None = None
    _plans: dict[Hashable, Plan] = internal(factory=dict)

    def plan(self, ranks: int, stages_per_rank: int, partition: FixedPartitionSchedule | None = None) -> Plan:
        """
        Plan a pipeline with split backward passes, for the costs of both parts.

        Stages have the given partition, or the recipe's. Raises UserError if there are more stages than layers.
        """
        key = partition or (ranks, stages_per_rank)
        if key not in self._plans:
            nodes = Nodes.from_recipe(self.recipe)
            layers = nodes.graph.nodes[nodes.model_node].settings.get("num_hidden_layers")
            if isinstance(layers, int) and layers < ranks * stages_per_rank:
                raise UserError(
                    f"{layers} layers can't be cut into {ranks * stages_per_rank} stages; use fewer stages", 2
                )
            schedule = {"use": "pipeline.schedules.zero_bubble_1p", "stages_per_rank": stages_per_rank}
            values = {nodes.mesh_node: {PipelineDimension.name: ranks}, nodes.schedule_node: schedule}
            self._plans[key] = plan(self.recipe.with_values(values), self.device, None, self.cache, partition)
        return self._plans[key]

    def _plan_with_partition(
        self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None, recompute: Sequence[Recompute]
    ) -> Plan:
        """Plan a pipeline with these layers and recompute policies by stage; the recipe's by default."""
        if sizes is None and not recompute:
            return self.plan(ranks, stages_per_rank)
        placement = assign_stages_in_loop(ranks, stages_per_rank)
        sizes = sizes or partition_evenly(self.plan(ranks, 1).layers, len(placement))
        return self.plan(ranks, stages_per_rank, FixedPartitionSchedule(placement, tuple(sizes), tuple(recompute)))

    def stage_costs(
        self, ranks: int, stages_per_rank: int, sizes: Sequence[int] | None = None, recompute: Sequence[Recompute] = ()
    ) -> Costs:
        """Return the costs by stage in seconds."""
        return self._plan_with_partition(ranks, stages_per_rank, sizes, recompute).table

    def peak_activation_bytes(self, program: Program, sizes: Sequence[int] | None = None) -> list[int]:
        """Return the peak activation bytes by rank, without gradients and persistent bytes."""
        costs = self._plan_with_partition(
            program.ranks, program.stages // program.ranks, sizes, program.recompute
        ).costs
        whole, none = merge_split_backwards(program), dict.fromkeys(costs, 0)
        return [compute_peak_memory(whole, rank, costs, none).bytes for rank in range(program.ranks)]

    def auto_schedule_settings(self, ranks: int) -> dict[str, Any]:
        """
        Return one slice per layer in seconds, unless the recipe recomputes with recompute policies and copies to host
        memory.

        If the device's memory is known, slices have bytes too, and the memory limit is the device's free memory or
        MAX_ACTIVATIONS, whichever is smaller.

        Slices are the stages in a plan with one layer per stage. This plan's excess over a plan with one stage per rank
        is divided among the stages as `per_stage`.
        """
        one = self.plan(ranks, 1)
        count = one.layers
        partition = FixedPartitionSchedule(tuple(layer * ranks // count for layer in range(count)), (1,) * count)
        by_layer = self.plan(ranks, 1, partition)
        excess = by_layer.table.lengths.sum(0) - one.table.lengths.sum(0)
        per_stage = np.clip(excess / max(1, count - ranks), 0, 0.9 * by_layer.table.lengths.min(0))
        lengths = by_layer.table.lengths - per_stage
        settings = build_auto_schedule_slices(attrs.evolve(one.table, lengths=lengths))
        settings["per_stage"] = _round_to_nanoseconds(per_stage)
        if self.device.memory:
            activations, plans = _get_live_bytes_after(by_layer, "F"), [one]
            nodes = Nodes.from_recipe(self.recipe)
            if nodes.settings(Stages)["recompute"] == "none":
                recompute = {}
                for policy in POLICIES:
                    again = self.plan(ranks, 1, attrs.evolve(partition, recompute=(policy,) * count))
                    recompute[policy] = {
                        "again": _divide_clamp_and_round(
                            (again.table.lengths - by_layer.table.lengths)[:, 1:3].max(1), lengths[:, 0]
                        ),
                        "kept": _divide_clamp_and_round(_get_live_bytes_after(again, "F"), activations),
                    }
                    plans.append(self._plan_with_partition(ranks, 1, partition_evenly(count, ranks), (policy,) * ranks))
                settings["recompute"] = recompute
                if nodes.may_offload_activations:
                    settings["offload"] = _round_to_nanoseconds(by_layer.table.offload_by_stage)
            used = max(_sum_non_activation_bytes(planned, rank) for planned in plans for rank in planned.memory)
            room = self.device.memory - used
            settings["activations"] = activations.tolist()
            settings["pending"] = _get_live_bytes_after(by_layer, "I").tolist()
            settings["memory"] = max(1.0, min(float(room), float(MAX_ACTIVATIONS * activations.sum())))
        return settings


def _get_live_bytes_after(by_layer: Plan, op: str) -> Floats:
    """Return the bytes by stage alive after a pass `op` of one microbatch, at least 1."""
    costs = by_layer.costs
    return np.array([max(1.0, costs[stage].passes[op].total_kept_bytes) for stage in range(len(costs))])


def _divide_clamp_and_round(dividends: Floats, divisors: Floats) -> list[float]:
    """Divide by element, and round; negative ratios become 0."""
    return [round(max(0.0, float(ratio)), 4) for ratio in dividends / divisors]


def _sum_non_activation_bytes(planned: Plan, rank: RankMemory) -> int:
    """Sum a rank's bytes besides activations: persistent bytes, gradients, buffers, and temporary tensors."""
    temporary = (_find_max_temporary_bytes(planned.costs[stage].passes) for stage in rank.stages)
    return sum(rank.persistent.values()) + rank.whole_gradients + sum(rank.buffers.values()) + max(temporary)


def _find_max_temporary_bytes(passes: Passes) -> int:
    """Return the maximum bytes alive in a pass beyond its inputs and results."""
    forward, pending = passes["F"].total_kept_bytes, passes["I"].total_kept_bytes
    growth = {"F": forward, "I": max(0, pending - forward)}
    return max(cost.peak_delta - growth.get(op, 0) for op, cost in passes.items())


def build_auto_schedule_slices(table: CostTable) -> dict[str, Any]:
    """Return settings for `pipeline.schedules.auto` whose slices are the stages in a cost table."""
    # A pass without duration, such as the gradients of frozen weights, could be anywhere in a schedule.
    lengths = np.maximum(table.lengths, MIN_SLICE_SECONDS)
    return {"comm": round(table.comm, 9), "slices": [_round_to_nanoseconds(costs) for costs in lengths]}


def _round_to_nanoseconds(costs: Floats) -> list[float]:
    """Round seconds to nanoseconds."""
    return [round(float(cost), 9) for cost in costs]
