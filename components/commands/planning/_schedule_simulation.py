"""Simulation of one schedule for `drawloom schedule`, with limits on its size, and with the chosen costs."""

from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from drawloom import UserError
from drawloom.components.commands._recipes import Pipeline, read_mesh_sizes, require_microbatches
from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.parallel.data_shard import should_gather_per_block
from drawloom.components.pipeline.program.builders import build_forward_only_program
from drawloom.components.pipeline.program.lowering import Sharding
from drawloom.components.pipeline.program.timing import Costs, CostTable, DeadlockError
from drawloom.components.pipeline.simulation.contention import Channels
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.pipeline.simulation.summary import Summary, format_count
from drawloom.components.planning.calibrate import load_local_device_model
from drawloom.components.planning.cost_sources import CostSource, PlannedCosts, TracedCosts, UnitCosts
from drawloom.components.planning.traces import TracedStep, read_traced_step
from drawloom.graph.project import Project, Recipe
from drawloom.graph.wiring.graph import Graph
from drawloom.ports import PartitioningSchedule, Program, Schedule

MAX_COST = 1e9  # sums of costs must be finite, and small differences must not vanish beside them

OPS = {"F": "forward", "I": "backward_input", "W": "backward_weight", "B": "backward"}
FREE = ("comm", "unshard", "reduce", "offload")  # operations that may cost nothing
SETTINGS = OPS | dict(zip(FREE, FREE, strict=True))

ParsedCosts = dict[str, Any] | Literal["plan"] | Path
"""Costs by setting, or the source of the costs: a plan, or a run folder with traces."""


def parse_costs(text: str) -> ParsedCosts:
    """Parse costs: `plan`, a run folder's path, or values such as F=1,I=1. Raises ValueError."""
    if text == "plan":
        return "plan"
    if "=" not in text and Path(text).is_dir():
        return Path(text)
    costs: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        try:
            costs[SETTINGS[key.strip()]] = number = float(value)
        except (KeyError, ValueError):
            known = f"{', '.join(SETTINGS)}, `plan`, or a run folder"
            raise ValueError(f"{part!r} is not a cost; write for example F=1 ({known})") from None
        if not (0 <= number <= MAX_COST and (number or key.strip() in FREE)):
            minimum = "F, B, I and W cost more than 0, all else 0 or more"
            raise ValueError(f"{part!r}: {minimum}, and none more than {MAX_COST:g}")
    return costs


def make_cost_source(costs: ParsedCosts, device: str, project: Project, recipe: Recipe | None) -> CostSource:
    """Return the source of costs. Raises UserError if it is `plan` and there is no recipe."""
    if isinstance(costs, dict):
        return UnitCosts(Costs(**costs))
    if isinstance(costs, Path):
        return TracedCosts(read_last_traced_step(costs, project))
    if recipe is None:
        raise UserError("--costs plan needs a recipe to plan; write a recipe, or costs such as F=1,I=1,W=1", 2)
    return PlannedCosts(recipe, find_device_model(device) if device else load_local_device_model())


def read_last_traced_step(folder: Path, project: Project) -> TracedStep:
    """Read the last traced step of a run folder, matched with the program of the run's recipe."""
    pipeline = Pipeline.from_recipe(Recipe.load(folder, project=project))
    return read_traced_step(
        folder, pipeline.schedule.program(pipeline.ranks, require_microbatches(pipeline.microbatches))
    )


def choose_cost_settings_of_schedule(setting_names: Container[str], source: CostSource, ranks: int) -> dict[str, Any]:
    """Return a schedule's cost settings: `slices` for `auto`, otherwise `comm`, a message's cost in forward passes."""
    if "slices" in setting_names:
        return source.auto_schedule_settings(ranks)
    if "comm" in setting_names:
        costs = source.stage_costs(ranks, 2)
        forward = costs.lengths[:, 0].mean() if isinstance(costs, CostTable) else costs.forward
        return {"comm": float(costs.comm / forward)}
    return {}


# The largest schedule takes about 5 s to simulate; the picture grows with the square of the ranks.
MAX_RANKS, MAX_WORK = 1000, 50_000


@attrs.frozen
class Size:
    """Number of pipeline ranks, and of microbatches per step."""

    ranks: int
    microbatches: int

    def __str__(self) -> str:
        return f"{format_count(self.ranks, 'rank')}, {format_count(self.microbatches, 'microbatch', 'es')}"


class UnsuitableError(UserError):
    """Error for a schedule with more stages than the model has layers, or that does not fit in memory."""


@attrs.frozen
class ScheduleSimulator:
    """
    Simulator for schedules with one source of costs.

    `has_stage_costs` is true for the trace of a recipe's own run, which has the costs of whole stages.
    """

    source: CostSource
    costs: ParsedCosts
    channels: Channels
    forward_only: bool
    has_stage_costs: bool

    def simulate_schedule(
        self, name: str, schedule: Schedule, size: Size, sharding: Sharding | None = None, *, offloads: bool = False
    ) -> Summary:
        """Simulate a schedule. Raises UserError if it is too large, UnsuitableError if it does not suit the model."""
        ranks, microbatches = size.ranks, size.microbatches
        try:
            stages = len(schedule.stage_to_rank(ranks)) // ranks if ranks <= MAX_RANKS else 1
        except UserError as error:
            raise UnsuitableError(str(error), error.exit_code) from error
        if ranks > MAX_RANKS or ranks * microbatches * stages > MAX_WORK:
            large = f"{ranks} ranks with {microbatches} microbatches on {stages} stages each"
            limits = f"{MAX_RANKS} ranks, and {MAX_WORK} microbatches times ranks times stages"
            raise UserError(f"{large} take too long to simulate; write at most {limits}", 2)
        program = schedule.program(ranks, microbatches)
        if offloads:
            program = attrs.evolve(program, offloaded=frozenset(range(program.stages)))
        return self.simulate_program(name, program, sharding, self._count_model_slices_by_stage(schedule, ranks))

    def _count_model_slices_by_stage(self, schedule: Schedule, ranks: int) -> Sequence[int] | None:
        """Return the model slice count per stage, or None if the schedule or the costs do not define slices."""
        if self.has_stage_costs or not isinstance(schedule, PartitioningSchedule):
            return None
        slices = self.source.auto_schedule_settings(ranks).get("slices")
        return schedule.layers_by_stage(ranks, len(slices)) if slices else None

    def simulate_program(
        self, name: str, program: Program, sharding: Sharding | None = None, sizes: Sequence[int] | None = None
    ) -> Summary:
        """Simulate a program, and return the summary with its memory."""
        if self.forward_only:
            program, sharding = build_forward_only_program(program.stage_to_rank, program.microbatches), None
        elif isinstance(self.costs, dict):
            if sharding is None and {"unshard", "reduce"} & self.costs.keys():
                sharding = Sharding("unshard" in self.costs)  # without a recipe, parameters are gathered once per step
            if "offload" in self.costs:
                program = attrs.evolve(program, offloaded=program.offloaded or frozenset(range(program.stages)))
        try:
            costs = self.source.stage_costs(program.ranks, program.stages // program.ranks, sizes, program.recompute)
        except UserError as error:
            raise UnsuitableError(str(error), error.exit_code) from error
        try:
            simulation = simulate(program, costs, self.channels, sharding)
        except DeadlockError as deadlock:
            raise UserError(f"{name} can't be executed: {deadlock}") from deadlock
        return Summary(
            name, simulation, None if self.forward_only else self.source.peak_activation_bytes(program, sizes)
        )


def offloads_activations(graph: Graph) -> bool:
    """Return whether stages offload activations to host memory."""
    return any(node.spec.use == "pipeline.offloaded" for node in graph.nodes.values())


def describe_parameter_sharding(graph: Graph) -> Sharding | None:
    """Return how the recipe's mesh shards or replicates parameters; None without data parallelism."""
    sizes = read_mesh_sizes(graph)
    shards = sizes.data_shard * sizes.context
    if sizes.data_replicate * shards == 1:
        return None
    for node in graph.nodes.values():
        if {"reshard_after_forward", "sync_each_microbatch"} <= node.settings.keys():
            by_block = should_gather_per_block(node.settings["reshard_after_forward"], sizes.pipeline)
            return Sharding(shards > 1 and not by_block, shards > 1 and node.settings["sync_each_microbatch"])
    return None
