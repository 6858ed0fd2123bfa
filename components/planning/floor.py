"""
Floor under a planned step ("speed of light"): lower bounds by operation, measured seconds, and faster settings.

An operation multiplies at the device's peak, reads its inputs and writes its results once at the memory's bandwidth,
and takes the longer of both (Williams et al. 2009, "Roofline", CACM 52(4)). Operations hide messages, unless the links
take longer than all operations. Measured seconds in a run's steps are by operation if the run was traced.
"""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import attrs

from drawloom import Recipe, UserError
from drawloom.components.distributed.device_model import FASTER_PRODUCTS
from drawloom.components.distributed.mesh_layout import DATA
from drawloom.components.planning.check import WARM_UP_STEPS
from drawloom.components.planning.cost_sources import (
    ACTION,
    STEP,
    Span,
    TracedOperation,
    find_newest_trace_files,
    read_trace,
)
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import Plan
from drawloom.components.planning.search import (
    SCHEDULES,
    RemedyData,
    TriedPlan,
    Values,
    list_settings_against_memory,
    try_settings,
)
from drawloom.components.planning.stage_costs import ATTENTION, ELEMENTWISE, OPERATIONS, PRODUCTS, Work, add_by_label
from drawloom.components.planning.step_time import find_busiest_rank, is_host_bound
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.components.storage.step_log import read_step_log
from drawloom.graph.cli.command import output, output_class
from drawloom.graph.cli.terminal import format_table
from drawloom.ports import OPS, Batching

UPDATE, WAITING, WHOLE_STEP = "update", "exchanges and waiting", "step"
"""
Kinds besides the operations in passes: operations after the last pass, time in which the device does nothing or only
exchanges messages, and the sum.
"""

NAMES = {
    ATTENTION: ("sdpa", "attention", "fmha", "flash", "cudnn::fusion"),
    PRODUCTS: (
        *("gemm", "nvjet", "cutlass", "xmma", "_rows_kernel", "_outer_products_kernel", "_groups_kernel"),
        *("logit_kernel", "logits_kernel", "grad_hidden_kernel", "grad_weight_kernel", "::mm", "::addmm", "::bmm"),
    ),
}
"""Substrings in names: GPU kernels and, in a CPU's trace, operations, all in lower case; the first match counts."""


@attrs.frozen
class MeasuredStep:
    """Where seconds were measured, in words, and the seconds in a step by kind, as far as they are known."""

    source: str
    seconds: Mapping[str, float] = attrs.field(factory=dict)


def read_measured_step(folder: Path, pipeline_ranks: int, rank: int) -> MeasuredStep:
    """Read a pipeline rank's newest trace, or else the median step in `metrics.jsonl`."""
    rows = [line.row for line in read_step_log(folder / "metrics.jsonl")[0]]
    steps = [row for row in rows if isinstance(row.get("seconds/step"), float)]
    seconds = [row["seconds/step"] - row.get("seconds/excluded", 0.0) for row in steps]
    median = statistics.median(seconds[WARM_UP_STEPS:] or seconds or [0.0])
    if (folder / "traces").is_dir():
        paths = find_newest_trace_files(folder, pipeline_ranks)
        path = paths[rank * len(paths) // pipeline_ranks]
        return MeasuredStep(f"{path.name}; an untraced step takes {median:.3g} s", _read_seconds_by_kind(path))
    if not median:
        return MeasuredStep("nothing, because `metrics.jsonl` has no steps with metrics.phase_times")
    return MeasuredStep("whole steps; --overlay with_profiler measures kinds of operations", {WHOLE_STEP: median})


def _read_seconds_by_kind(path: Path) -> dict[str, float]:
    """Read the mean seconds in a traced step by kind; every moment counts for one kind."""
    trace = read_trace(path)
    steps = [(begin, end) for begin, end, name in trace.ranges if STEP.fullmatch(name)]
    spans: dict[str, list[Span]] = defaultdict(list)
    for begin, end in steps:
        ends = [until for _, until, name in trace.ranges if begin < until <= end and ACTION.fullmatch(name)]
        for operation in trace.on_gpu or trace.on_cpu:
            if begin <= operation.issued < end:
                spans[_choose_kind(operation, max(ends, default=end))].append(operation.span)
    if not spans:
        raise UserError(f"{path} has no operations in steps; remove it, or trace the run again")
    moments = [moment for span in chain(*spans.values()) for moment in span]
    seconds = {WHOLE_STEP: max(moments) - min(moments)}
    covered, so_far = 0.0, list[Span]()
    for kind in (UPDATE, ATTENTION, PRODUCTS, ELEMENTWISE):  # a CPU's operations contain one another
        so_far += spans[kind]
        before, covered = covered, _count_covered_seconds(so_far)
        seconds[kind] = covered - before
    seconds[WAITING] = seconds[WHOLE_STEP] - covered
    return {kind: total / len(steps) for kind, total in seconds.items()}


def _choose_kind(operation: TracedOperation, end_of_passes: float) -> str:
    """Return an operation's kind, by its name and the time when the host issued it."""
    name = operation.name.lower()
    if "nccl" in name:
        return WAITING
    if operation.issued >= end_of_passes:
        return UPDATE
    return next((kind for kind, parts in NAMES.items() if any(part in name for part in parts)), ELEMENTWISE)


def _count_covered_seconds(spans: Sequence[Span]) -> float:
    """Return the seconds covered by spans."""
    covered, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered


UNPLANNED = "waiting that is not planned"

MAX_GAPS = 3

SHARD_SETTINGS = ("reshard_after_forward", "sync_each_microbatch")

MIN_GAIN = 0.01
"""Smallest gap, and smallest gain, in steps: plans are not more accurate."""


@attrs.frozen
class FloorRow:
    """Seconds in a step by operation, on the rank that is busy longest."""

    kind: str = output("operation, or reason to wait; the last row is the step")
    flops: float = output("seconds for FLOPs at the device's peak")
    memory: float = output("seconds for bytes at the memory's bandwidth")
    links: float = output("seconds for messages at the links' bandwidth")
    floor: float = output("lower bound in seconds")
    planned: float = output("planned seconds")
    measured: float | None = output("measured seconds, if they are known")
    faster: RemedyData | None = output("in gaps: settings with a gain by plan", default=None)

    @property
    def seconds(self) -> float:
        """Return the measured seconds, or else the planned ones."""
        return self.planned if self.measured is None else self.measured


@output_class
class Floor:
    """Floor under a step, and its largest gaps."""

    source: str = output("trace with the measured seconds, or the reason why there are none")
    rows: Sequence[FloorRow] = output("operations, reasons to wait, and the step")
    gaps: Sequence[FloorRow] = output("rows with the largest gaps, in decreasing order")

    def __str__(self) -> str:
        *_, step = self.rows
        scale, unit = (1.0, "s") if step.planned >= 1 else (1e3, "ms")
        names = ["flops", "memory", "links", "floor", "planned", *["measured"] * (step.measured is not None)]
        table = [[unit, *names, "reached"]]
        for row in self.rows:
            numbers = [getattr(row, name) for name in names]
            texts = [f"{number * scale:,.3g}" if number else "" for number in numbers]
            reached = f"{row.floor / row.seconds:.0%}" if row.floor and row.seconds else ""
            table.append([row.kind, *texts, reached])
        lines = [f"floor at the data sheet's rates; measured: {self.source}", format_table(table)]
        if step.seconds < step.floor:
            lines.append("measured below the floor: plan for the run's --device, or measure a CPU by --calibrate")
        for gap in self.gaps:
            lines += [f"{gap.kind}: {(gap.seconds - gap.floor) * scale:.3g} {unit} above the floor"]
            if faster := gap.faster:
                seconds = f"{faster.step_seconds * scale:.3g} {unit} a step by plan"
                memory = format_decimal_byte_size(faster.peak_memory_bytes)
                gain = f"{seconds} ({faster.step_seconds / step.planned - 1:.1%}), {memory}"
                lines += [f"  {'; '.join(faster.toml)}  # {gain}; {faster.cost}"]
            else:
                lines += [f"  no setting that was tried saves {MIN_GAIN:.0%} of the step there"]
        return "\n".join(lines)


def compute_floor(recipe: Recipe, planned: Plan, folder: Path | None) -> Floor:
    """
    Return the floor under a recipe's plan, beside the measured seconds in a run's folder.

    Settings for the largest gaps fit, and are faster by plan.
    """
    measured = MeasuredStep("nothing, because this is not a run folder")
    if folder:
        measured = read_measured_step(folder, planned.program.ranks, find_busiest_rank(planned.program, planned.table))
    *kinds, step = rows = list_floor_rows(planned, measured)
    before, least = _sum_work(planned), MIN_GAIN * step.planned
    faster = [(tried, _sum_work(tried.plan)) for tried in _find_faster_plans(recipe, planned)]
    gaps: list[FloorRow] = []
    for row in sorted(kinds, key=lambda row: row.floor - row.seconds)[:MAX_GAPS]:
        saving = [tried for tried, after in faster if before[row.kind].planned - after[row.kind].planned > least]
        best = min(saving, key=lambda tried: tried.plan.time.seconds, default=None)
        faster = [pair for pair in faster if best is None or pair[0].keys.isdisjoint(best.keys)]
        if row.seconds - row.floor > least:
            gaps.append(attrs.evolve(row, faster=best.data if best else None))
    return Floor(source=measured.source, rows=rows, gaps=gaps)


def list_floor_rows(planned: Plan, measured: MeasuredStep) -> list[FloorRow]:
    """Return a row for every operation and every reason to wait, and one for the step."""
    work = _sum_work(planned)
    operations = {kind: part for kind, part in work.items() if part.floor}
    waits = {kind: part for kind, part in work.items() if part.planned > 1e-9 and not part.floor}
    computing, waiting = (sum(parts.values(), Work()) for parts in (operations, waits))
    beyond = 1 - computing.floor / waiting.links if waiting.links > computing.floor else 0.0
    rows = operations | {kind: attrs.evolve(part, floor=beyond * part.links) for kind, part in waits.items()}
    seconds = dict(measured.seconds)
    if WAITING in seconds:
        rows[UNPLANNED] = Work()
        seconds[UNPLANNED] = seconds[WAITING] - waiting.planned
    rows[WHOLE_STEP] = sum(rows.values(), Work())
    return [FloorRow(kind=kind, **attrs.asdict(part), measured=seconds.get(kind)) for kind, part in rows.items()]


def _sum_work(planned: Plan) -> Mapping[str, Work]:
    """
    Return the work by kind on the rank that is busy longest; waiting has no floor.

    All planned seconds add up to the step's.
    """
    program, time, rank = planned.program, planned.time, find_busiest_rank(planned.program, planned.table)
    rows, times = program.rows(rank), planned.exchanges[rank]
    work = dict.fromkeys(OPERATIONS, Work())
    messages, host, exposed = times.gathered_once + times.reduced_once, 0.0, time.gather + time.sync
    for (stage, op), count in Counter(zip(program.stage[rows], program.op[rows], strict=True)).items():
        costs = planned.costs[stage]
        cost = costs.passes[OPS[op]]
        own = cost.host if is_host_bound(costs) else cost.seconds
        work = add_by_label(work, cost.work, count, Work())
        host += count * (own - cost.seconds)
        exposed += count * (float(planned.table.lengths[stage, op]) - own)
        messages += times.get_exchanges_beside_pass(stage, OPS[op]) * count
    update = max((times.update for times in planned.exchanges), key=lambda update: update.planned)
    computing = sum((work[kind] for kind in OPERATIONS), Work())
    replicas = [name for name in DATA if getattr(planned.mesh.sizes, name) > 1]
    parameters = f"parameters over {' x '.join(replicas)}" if replicas else "copies from host memory"
    return defaultdict(Work, work) | {
        "reference model": computing * (time.reference / computing.planned),
        UPDATE: update,
        parameters: attrs.evolve(messages, planned=exposed),
        "pipeline bubble": Work(planned=time.bubble),
        "offloaded activations": Work(planned=time.offload),
        # A host slower than the device issues passes during the update.
        "launches by the host": Work(planned=host + time.update - update.planned),
    }


def _find_faster_plans(recipe: Recipe, planned: Plan) -> Iterator[TriedPlan]:
    """Yield plans with other settings that are valid, fit, and are faster."""
    nodes = Nodes.from_recipe(recipe)
    for values, cost in _list_settings_with_cost(nodes, planned):
        tried = try_settings(recipe, values, cost, planned.device, planned.ranks)
        if tried and tried.plan.fits and tried.plan.time.seconds < (1 - MIN_GAIN) * planned.time.seconds:
            yield tried


def _list_settings_with_cost(nodes: Nodes, planned: Plan) -> Iterator[tuple[Values, str]]:
    """Yield settings and their cost in words; some are invalid in this recipe, or change nothing."""
    for values, cost, ranks in list_settings_against_memory(nodes, planned):
        if ranks == planned.ranks:
            yield values, cost
    sizes, mesh, stages = planned.mesh.sizes, nodes.mesh_node, nodes.stages_node
    rows, shards = nodes.settings(Batching)["micro_size"], sizes.data_shard
    for size in (2 * rows, 4 * rows, 8 * rows):
        yield {nodes.find_only_node(Batching): {"micro_size": size}}, "a microbatch has more activations"
    yield {stages: {"recompute": "none"}}, "all activations are kept"
    for keys in (SHARD_SETTINGS[:1], SHARD_SETTINGS[1:], SHARD_SETTINGS):
        yield {stages: dict.fromkeys(keys, False)}, "whole parameters or gradients are kept"
    for schedule in SCHEDULES:
        yield {nodes.schedule_node: {"use": f"pipeline.schedules.{schedule}"}}, "passes have another order"
    for dtype, use in FASTER_PRODUCTS.items():
        if dtype in planned.device.peaks:
            yield {dtype: {"use": use}}, "products round to 8 bits"
    yield {"capture": {"use": "pipeline.captured"}}, "passes are CUDA graphs"
    yield {stages: {"dispatcher": {"use": "experts.symmetric"}}}, "experts' ranks need NVLink"
    yield {mesh: {"data_shard": 1, "data_replicate": shards * sizes.data_replicate}}, "parameters are not sharded"
    for name, size in (("tensor", sizes.tensor), ("pipeline", sizes.pipeline)):
        yield {mesh: {name: 1, "data_shard": shards * size}}, "parameters are gathered from other ranks"
    for name in nodes.streaming_optimizer_nodes:
        yield {name: {"states": "device"}}, "optimizer state stays on the device"
