"""
Floor of a planned step ("speed of light"): lower bounds by kind of operation, measured seconds, and faster settings.

An operation multiplies at the device's peak, reads its inputs and writes its results once at the memory's bandwidth,
and takes the longer of both (Williams et al. 2009, "Roofline", CACM 52(4)). Operations hide messages, unless the links
take longer than all operations.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from drawloom.components.distributed.mesh_layout import DATA
from drawloom.components.planning.measured_step import UPDATE, WAITING, WHOLE_STEP, MeasuredStep, read_measured_step
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import Plan
from drawloom.components.planning.recorder import OPERATIONS, Work, add_by_label
from drawloom.components.planning.remedies import RemedyData, TriedPlan, Values, try_settings
from drawloom.components.planning.search import SCHEDULES
from drawloom.components.planning.step_time import is_host_bound
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.graph.cli.result import output, output_class
from drawloom.graph.cli.terminal import format_table
from drawloom.graph.project import Recipe
from drawloom.ports import OPS, Batching, MemoryPolicy, Precision, Stages

REFERENCE, UNPLANNED = "reference model", "not planned"

MAX_GAPS = 3

MIN_GAIN = 0.01
"""Smallest part of a step that counts as a gap, or as a gain: plans are not more accurate."""


@output_class
class FloorRow:
    """Seconds of a step by kind of operation, on the rank that is busy longest."""

    kind: str = output("kind of operation, or reason to wait; the last row is the step")
    within: str = output("row that contains this one, or an empty string")
    flops: float = output("seconds for FLOPs at the device's peak")
    memory: float = output("seconds for bytes at the memory's bandwidth")
    links: float = output("seconds for messages at the links' bandwidth")
    floor: float = output("lower bound in seconds")
    planned: float = output("planned seconds")
    measured: float | None = output("measured seconds, if they are known")

    @property
    def seconds(self) -> float:
        """Return the measured seconds, or else the planned ones."""
        return self.planned if self.measured is None else self.measured


@output_class
class FloorGap:
    """Kind of operation far above its floor."""

    kind: str = output("kind of operation, or reason to wait")
    seconds: float = output("seconds above the floor")
    faster: RemedyData | None = output("settings that save most of them; None if none saves 1 % of the step")


@output_class
class Floor:
    """Floor of a step, and its largest gaps."""

    source: str = output("source of the measured seconds, or the reason why there are none")
    rows: Sequence[FloorRow] = output("kinds of operations")
    gaps: Sequence[FloorGap] = output("largest gaps, in decreasing order")

    def __str__(self) -> str:
        *_, step = self.rows
        scale, unit = (1.0, "s") if step.planned >= 1 else (1e3, "ms")
        names = ["flops", "memory", "links", "floor", "planned", *["measured"] * (step.measured is not None)]
        table = [[unit, *names, "reached"]]
        for row in self.rows:
            numbers = [getattr(row, name) for name in names]
            texts = [f"{number * scale:,.3g}" if number else "" for number in numbers]
            reached = f"{row.floor / row.seconds:.0%}" if row.floor and row.seconds else ""
            table.append(["  " * bool(row.within) + row.kind, *texts, reached])
        lines = [f"floor at the data sheet's rates; measured: {self.source}", format_table(table)]
        if step.seconds < step.floor:
            lines.append("measured below the floor: plan for the run's --device, or measure a CPU by --calibrate")
        for gap in self.gaps:
            lines += [f"{gap.kind}: {gap.seconds * scale:.3g} {unit} above the floor"]
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
    Return the floor of a recipe's plan, beside the measured seconds in a run's folder.

    Settings for the largest gaps fit, and are faster by plan.
    """
    measured = MeasuredStep("nothing, because this is not a run folder")
    if folder:
        measured = read_measured_step(folder, planned.program.ranks, _find_busiest_rank(planned))
    rows = list_floor_rows(planned, measured)
    containers, least = {WHOLE_STEP, *(row.within for row in rows)}, MIN_GAIN * planned.time.seconds
    gaps = [(row.seconds - row.floor, row.kind) for row in rows if row.kind not in containers]
    before, faster = sum_planned_seconds(planned), list(_find_faster_plans(recipe, planned))
    largest: list[FloorGap] = []
    for gap, kind in sorted(gaps, reverse=True)[:MAX_GAPS]:
        saved = {before[kind] - sum_planned_seconds(tried.plan)[kind]: tried for tried in faster}
        best = saved[max(saved)] if max(saved, default=0.0) > least else None
        faster = [tried for tried in faster if best is None or tried.keys.isdisjoint(best.keys)]
        largest += [FloorGap(kind, gap, best.data if best else None)] if gap > least else []
    return Floor(source=measured.source, rows=rows, gaps=largest)


def list_floor_rows(planned: Plan, measured: MeasuredStep) -> list[FloorRow]:
    """Return a row for every kind of operation, for all waiting, for its parts, and for the step."""
    work, seconds = _sum_work(planned), dict(measured.seconds)
    operations = {kind: work.pop(kind) for kind in (*OPERATIONS, REFERENCE, UPDATE) if kind in work}
    computing, waiting = (sum(parts.values(), Work()) for parts in (operations, work))
    hidden = min(1.0, computing.floor / waiting.links) if waiting.links else 1.0
    waits = {kind: attrs.evolve(part, floor=(1 - hidden) * part.links) for kind, part in work.items()}
    unplanned = seconds.get(WAITING, 0.0) - waiting.planned
    if work and unplanned > MIN_GAIN * planned.time.seconds:
        waits[UNPLANNED], seconds[UNPLANNED] = Work(), unplanned
    waiting = sum(waits.values(), Work())
    rows = [(kind, "", part) for kind, part in operations.items()]
    rows += [(WAITING, "", waiting), *((kind, WAITING, part) for kind, part in waits.items())]
    return [
        FloorRow(kind=kind, within=within, **attrs.asdict(part), measured=seconds.get(kind))
        for kind, within, part in [*rows, (WHOLE_STEP, "", computing + waiting)]
    ]


def sum_planned_seconds(planned: Plan) -> Mapping[str, float]:
    """Return a plan's seconds by kind; 0 for missing kinds."""
    return Counter({kind: part.planned for kind, part in _sum_work(planned).items()})


def _sum_work(planned: Plan) -> dict[str, Work]:
    """Return the work by kind on the rank that is busy longest; all planned seconds add up to the step's."""
    program, time, rank = planned.program, planned.time, _find_busiest_rank(planned)
    rows, times = program.rows(rank), planned.exchanges[rank]
    work: dict[str, Work] = {}
    messages, host, exposed = times.gathered_once + times.reduced_once, 0.0, time.gather + time.sync
    for (stage, op), count in Counter(zip(program.stage[rows], program.op[rows], strict=True)).items():
        costs = planned.costs[stage]
        cost = costs.passes[OPS[op]]
        own = cost.host if is_host_bound(costs) else cost.seconds
        work = add_by_label(work, cost.work, count, Work())
        host += count * (own - cost.seconds)
        exposed += count * (float(planned.table.lengths[stage, op]) - own)
        messages += count * times.get_seconds_beside_pass(stage, OPS[op])
    update = max((times.update for times in planned.exchanges), key=lambda update: update.planned)
    computing = sum((part for kind, part in work.items() if kind in OPERATIONS), Work())
    replicas = [name for name in DATA if getattr(planned.mesh.sizes, name) > 1]
    parts = {
        REFERENCE: computing * (time.reference / computing.planned),
        UPDATE: update,
        f"parameters over {' x '.join(replicas)}" if replicas else "frozen weights": Work(
            links=messages * planned.device.reached.messages, planned=exposed
        ),
        "pipeline bubble": Work(planned=time.bubble),
        "offloaded activations": Work(planned=time.offload),
        # A host slower than the device issues passes during the update.
        "launches by the host": Work(planned=host + time.update - update.planned),
    }
    return work | {kind: part for kind, part in parts.items() if max(part.planned, part.links) > 1e-9}


def _find_busiest_rank(planned: Plan) -> int:
    """Return the pipeline rank with the longest passes."""
    lengths = planned.table.get_durations(planned.program)
    return max(range(planned.program.ranks), key=lambda rank: float(lengths[planned.program.rows(rank)].sum()))


def _find_faster_plans(recipe: Recipe, planned: Plan) -> Iterator[TriedPlan]:
    """Yield plans with other settings that are valid, fit, and are faster."""
    for values, cost in _list_settings_with_cost(Nodes.from_recipe(recipe), planned):
        tried = try_settings(recipe, values, cost, planned.device, planned.ranks)
        if tried and tried.plan.fits and tried.plan.time.seconds < (1 - MIN_GAIN) * planned.time.seconds:
            yield tried


def _list_settings_with_cost(nodes: Nodes, planned: Plan) -> Iterator[tuple[Values, str]]:
    """Yield settings that may save time, and their cost in words."""
    sizes, peaks = planned.mesh.sizes, planned.device.peaks
    batch, stages, precision = (nodes.settings(port) for port in (Batching, Stages, Precision))
    size, batch_node, mesh = batch["micro_size"], nodes.find_only_node(Batching), nodes.mesh_node
    for rows in (8 * size, 4 * size, 2 * size, size // 2):
        if rows:
            yield {batch_node: {"micro_size": rows}}, "more activations" if rows > size else "products of fewer rows"
    if stages["recompute"] != "none" and not nodes.find_nodes(MemoryPolicy):
        for policy in ("selective", "none"):
            yield {nodes.stages_node: {"recompute": policy}}, "more activations are kept"
    if (precision["compute"] or precision["parameter"]) == "float32":
        yield {nodes.find_only_node(Precision): {"compute": "bfloat16"}}, "layers compute with 8 bits of fraction"
    if "float8" in peaks:
        yield {"float8": {"use": "float8.training"}}, "products round to 8 bits"
    yield {"capture": {"use": "pipeline.captured"}}, "passes are CUDA graphs"
    if nodes.has_experts:
        yield {nodes.stages_node: {"dispatcher": {"use": "experts.symmetric"}}}, "needs NVLink between the ranks"
    if sizes.pipeline > 1:
        for schedule in SCHEDULES:
            yield {nodes.schedule_node: {"use": f"pipeline.schedules.{schedule}"}}, "another order of passes"
    if sizes.data_shard > 1:
        for keys in (
            ("reshard_after_forward",),
            ("sync_each_microbatch",),
            ("reshard_after_forward", "sync_each_microbatch"),
        ):
            yield {nodes.stages_node: dict.fromkeys(keys, False)}, "ranks keep whole parameters or gradients"
        yield {mesh: {"data_shard": 1, "data_replicate": sizes.data_shard * sizes.data_replicate}}, "no shards"
    for name in ("tensor", "pipeline"):
        if (size := getattr(sizes, name)) > 1:
            yield {mesh: {name: 1, "data_shard": sizes.data_shard * size}}, "parameters are gathered from other ranks"
    for name in nodes.streaming_optimizer_nodes:
        yield {name: {"states": "device"}}, "optimizer state stays on the device"
        yield {name: {"state_dtype": "uint8"}}, "means of the optimizer have 8 bits"
