"""plan a run without a GPU or data: memory per rank, time per step, tokens per second"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from drawloom import above, between
from drawloom.components.commands._options import check_writable_file, write_file
from drawloom.components.distributed.device_model import DeviceModel, find_device_model
from drawloom.components.planning.calibrate import (
    choose_local_device,
    load_local_device_model,
    measure_and_save_calibration,
)
from drawloom.components.planning.checkpoint_interval import CheckpointInterval, propose_checkpoint_interval
from drawloom.components.planning.floor import Floor, compute_floor
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import Plan, plan
from drawloom.components.planning.run_length import count_run_length
from drawloom.components.planning.search import (
    RemedyData,
    TriedPlan,
    find_remedies,
    format_remedies,
    format_search_table,
    search_fastest_plans,
)
from drawloom.components.planning.text import format_plan
from drawloom.graph.cli.command import (
    FAILED,
    OK,
    OverlayCommand,
    Project,
    Recipe,
    Result,
    TextResult,
    UserError,
    argument,
    command,
    option,
    output,
    output_class,
    print_escaped_text,
)
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.ports import OPS


@output_class
class RankData:
    """Memory of a pipeline rank, in bytes."""

    stages: Sequence[int] = output("stages of the rank")
    kept: Mapping[str, int] = output("persistent bytes by kind")
    gradients: int = output("gradients at the end of a step")
    peak_gradients: int = output("gradients at the peak")
    activations: Mapping[str, int] = output("activations at the peak, by kind")
    buffers: Mapping[str, int] = output("buffers at the peak, by kind")
    peak: int = output("peak")
    host: int = output("optimizer state and waiting activations in host memory")
    when: str = output("part of the step with the peak")


@output_class
class StageData:
    """Sizes and times of a stage, for one microbatch."""

    pipeline_rank: int = output("pipeline rank of the stage")
    parameters: int = output("number of parameters")
    trained_parameters: int = output("number of trained parameters")
    seconds: Mapping[str, float] = output("seconds by pass")
    activations: Mapping[str, int] = output("bytes kept until the backward pass, by kind")
    sent_bytes: int = output("bytes sent to the next stage")


@output_class
class ChoiceData:
    """A memory policy's choice."""

    recompute: Sequence[str] = output("recompute policy by stage")
    offloaded: Sequence[int] = output("stages whose activations wait in host memory")
    host_states: Sequence[float] = output("fraction of the optimizer's state in host memory, by pipeline rank")


@output_class
class PlanData:
    """Plan of a run on a device."""

    device: str = output("device")
    ranks: int = output("number of processes")
    mesh: Mapping[str, int] = output("mesh sizes by dimension")
    microbatches: int = output("microbatches of a step on each replica")
    document_tokens: float | None = output("mean tokens of a document, if documents limit attention")
    fits: bool = output("whether every rank fits in the memory of the device")
    device_memory_bytes: int | None = output("memory of the device")
    peak_memory_bytes: Sequence[int] = output("peak by rank")
    memory: Sequence[RankData] = output("memory by pipeline rank")
    stages: Sequence[StageData] = output("stages")
    step_seconds: float = output("seconds of a step")
    seconds: Mapping[str, float] = output("seconds of a step by part")
    tokens_per_second: float = output("tokens per second of all ranks")
    mfu: float | None = output("model FLOPs utilization, from 0 to 1")
    run_seconds: float | None = output("seconds of all steps")
    choice: ChoiceData | None = output("choice of the memory policy, if the recipe has one")
    kept_seconds: float | None = output("seconds of a step with unlimited memory, if there is a memory policy")


@output_class
class PlanResult(PlanData, TextResult):
    """Plan of a run on a device, with remedies if it does not fit."""

    remedies: Sequence[RemedyData] = output("settings that need less memory, if the plan does not fit")
    checkpoint: CheckpointInterval | None = output("checkpoint interval, with --mtbf only")
    floor: Floor | None = output("lower bounds and gaps, with --floor only")

    @property
    def exit_code(self) -> int:
        """1 if the plan does not fit the device."""
        return OK if self.fits else FAILED


@output_class
class SearchedPlan(PlanData):
    """Plan of a search."""

    toml: Sequence[str] = output("settings as lines of TOML")


@output_class
class SearchResult(TextResult):
    """Plans of a search, with --search."""

    plans: Sequence[SearchedPlan] = output("plans, the fastest first")
    overlay: Path | None = output("overlay with the first plan's settings, with --to only")

    @property
    def exit_code(self) -> int:
        """1 if no plan fits the device."""
        return OK if self.plans and self.plans[0].fits else FAILED


@output_class
class CalibrationResult(Result):
    """Measured device, with --calibrate and without a recipe."""

    path: Path = output("file with the measurements, used by later plans")
    toml: str = output("measurements")

    def render(self, format: str) -> str:
        """Return the measurements and their path."""
        return f"{self.toml}\nkept in {self.path}"


@command
class PlanCommand(OverlayCommand):
    """A recipe's plan, after a calibration if asked for."""

    recipe: str = argument("a path, the name of a shipped recipe, or a run folder", default="")
    ranks: int | None = option("processes (default: the fewest the mesh allows)", check=between(1, 10_000_000))
    device: str = option(
        "h100, h200, a100, b200, mi300x, cpu, or a TOML file (default: this machine's device)",
        default="",
        metavar="DEVICE|FILE",
    )
    floor: bool = option(
        "show lower bounds of the time by kind of operation, and settings for the largest gaps; of a run folder also "
        "the measured time",
        exclusive="result",
    )
    calibrate: bool = option("measure this machine's device in less than a minute, and use the result in later plans")
    search: bool = option(
        "list the ten fastest meshes with microbatches, schedule and recomputation", needs="ranks", exclusive="result"
    )
    mtbf: float | None = option(
        "mean time between failures of one node, in hours; recommends how often to save",
        metavar="HOURS",
        check=above(0),
    )
    save_seconds: float | None = option(
        "seconds by which a save delays the run (default: estimated from its bytes)",
        metavar="SECONDS",
        check=above(0),
        needs="mtbf",
    )
    to: Path | None = option(
        "write the fastest as an overlay to this file", metavar="FILE", check=check_writable_file, needs="search"
    )

    def run(self, project: Project) -> PlanResult | SearchResult | CalibrationResult:
        calibration = None
        if self.calibrate:
            path = measure_and_save_calibration(choose_local_device())
            calibration = CalibrationResult(path, path.read_text("utf-8"))
        if not self.recipe:
            if calibration:
                return calibration
            raise UserError("plan takes a recipe, or --calibrate", 2)
        if calibration:
            print_escaped_text(calibration.render("text"))
        recipe = self.load_recipe(project, self.recipe)
        recipe.check(skip_machine_checks=True)
        device = find_device_model(self.device) if self.device else load_local_device_model()
        if self.search and self.ranks:
            return self._search_plans_and_write_best(recipe, device, self.ranks)
        planned = attrs.evolve(plan(recipe, device, self.ranks), length=count_run_length(recipe))
        parts, helpful, interval = [format_plan(planned)], list[TriedPlan](), None
        if not planned.fits:
            helpful = find_remedies(recipe, planned)
            parts.append(format_remedies(helpful))
        if self.mtbf is not None:
            nodes = Nodes.from_recipe(recipe)
            interval = propose_checkpoint_interval(nodes, planned, self.mtbf * 3600, self.save_seconds)
            parts.append(str(interval))
        floor = None
        if self.floor:
            is_run = Path(self.recipe, LOCK).is_file()
            floor = compute_floor(recipe, planned, Path(self.recipe) if is_run else None)
            parts.append(str(floor))
        remedies = [remedy.data for remedy in helpful]
        return PlanResult(
            **make_plan_fields(planned), remedies=remedies, checkpoint=interval, floor=floor, text="\n\n".join(parts)
        )

    def _search_plans_and_write_best(self, recipe: Recipe, device: DeviceModel, ranks: int) -> SearchResult:
        """Find the best plans, and write the best plan's settings as an overlay."""
        length = count_run_length(recipe)
        choices = [
            attrs.evolve(choice, plan=attrs.evolve(choice.plan, length=length))
            for choice in search_fastest_plans(recipe, device, ranks)
        ]
        table, overlay = format_search_table(choices), self.to if choices else None
        if overlay is not None:
            head = f"# For {ranks} ranks of {device.name}, by `drawloom plan {self.recipe} --search`."
            try:
                write_file(overlay, "\n".join([head, *choices[0].toml_lines, ""]).encode())
            except UserError:
                print_escaped_text(table)
                raise
            table += f"\nthe first one is an overlay in {overlay}"
        plans = [SearchedPlan(**make_plan_fields(choice.plan), toml=choice.toml_lines) for choice in choices]
        return SearchResult(table, plans, overlay)


def make_plan_fields(plan: Plan) -> dict[str, Any]:
    """Return a plan's fields for `PlanData`: bytes by rank, seconds by part."""
    return {
        "device": plan.device.name,
        "ranks": plan.ranks,
        "mesh": plan.mesh.sizes.without_expert_dimensions(),
        "microbatches": plan.microbatches,
        "document_tokens": plan.rows.document if plan.rows.document < math.inf else None,
        "fits": plan.fits,
        "device_memory_bytes": plan.device.memory,
        "peak_memory_bytes": plan.peak_memory_bytes,
        "memory": [
            RankData(
                stages=list(memory.stages),
                kept=dict(memory.persistent),
                gradients=memory.gradients,
                peak_gradients=memory.peak_gradient_bytes,
                activations=memory.activation_bytes_at_peak,
                buffers=dict(memory.buffers),
                peak=memory.peak_bytes,
                host=memory.host,
                when=memory.action_at_peak,
            )
            for memory in plan.memory
        ],
        "stages": [
            StageData(
                pipeline_rank=plan.program.stage_to_rank[stage],
                parameters=plan.elements[stage].all,
                trained_parameters=plan.elements[stage].trained,
                seconds={op: float(plan.table.lengths[stage, OPS.index(op)]) for op in costs.passes},
                activations=dict(costs.passes["F"].kept_bytes),
                sent_bytes=costs.sent,
            )
            for stage, costs in sorted(plan.costs.items())
        ],
        "step_seconds": plan.time.seconds,
        "seconds": attrs.asdict(plan.time),
        "tokens_per_second": plan.tokens_per_second,
        "mfu": plan.mfu,
        "run_seconds": None if plan.length is None else plan.length.steps * plan.time.seconds,
        "choice": plan.choice
        and ChoiceData([*map(str, plan.choice.recompute)], sorted(plan.choice.offloaded), [*plan.choice.host_states]),
        "kept_seconds": plan.kept_seconds,
    }
