"""simulate and draw a pipeline schedule, its bubble and activation memory, without a device"""

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import ClassVar

import attrs

from drawloom.components.commands._costs import ParsedCosts, make_cost_source, parse_costs, read_last_traced_step
from drawloom.components.commands._recipes import Pipeline, require_microbatches
from drawloom.components.commands._schedule_lookup import (
    FOLDER,
    check_stages_per_rank,
    find_schedule_name_and_spec,
    list_schedules_without_required_settings,
    names_a_recipe,
    open_schedule_by_name,
    suggest_schedule,
)
from drawloom.components.commands._schedule_result import (
    ComparisonResult,
    ScheduleData,
    ScheduleResult,
    make_schedule_data_fields,
)
from drawloom.components.commands._schedule_simulation import (
    ScheduleSimulator,
    Size,
    UnsuitableError,
    describe_parameter_sharding,
    offloads_activations,
)
from drawloom.components.pipeline.from_csv import read_program_file
from drawloom.components.pipeline.simulation.contention import Channels
from drawloom.components.pipeline.simulation.summary import LEGEND, Summary, format_comparison
from drawloom.components.planning.cost_sources import TracedCosts, UnitCosts
from drawloom.components.ports.pipeline import Schedule
from drawloom.graph import UserError
from drawloom.graph.cli.command import Count, OverlayCommand, argument, command, option
from drawloom.graph.project import Project, Recipe
from drawloom.graph.recipe.overrides import read_overrides
from drawloom.graph.registry.spec import Spec

EXCLUDED_BY_RUN = "recipe", "words", "overlay", "ranks", "microbatches", "stages_per_rank", "forward_only", "compare"
"""Options that --run rejects, because they would simulate a different run."""


@command("planning")
class ScheduleCommand(OverlayCommand):
    """A simulation for one schedule, or for all schedules."""

    epilog: ClassVar[str] = (
        "Set single values with node.key=value; in a schedule by its name, the node is called schedule."
    )

    recipe: str = argument(
        "a recipe; with --ranks also the name of a schedule, or a CSV file of torch.distributed.pipelining",
        default="",
        metavar="RECIPE|NAME|FILE",
    )
    ranks: Sequence[Count] = option(
        "pipeline ranks (default: the recipe's); with --compare also several, such as 4,8",
        default=(),
        metavar="N",
        separator=",",
    )
    microbatches: Sequence[Count] = option(
        "microbatches per step (default: the recipe's); with --compare also several, such as 4,8",
        default=(),
        metavar="N",
        separator=",",
    )
    stages_per_rank: Count | None = option("stages per rank (default: the schedule's)")
    costs: ParsedCosts | None = option(
        "costs of a rank's layers in any unit: forward (F), input gradients (I), weight gradients (W), whole backward "
        "(B, default I + W), a message (comm), with mesh.data_shard gathering parameters (unshard) and reducing "
        "gradients (reduce), and with pipeline.offloaded a copy of activations to host memory or back (offload); or "
        "seconds: planned (plan), or traced by listeners.profiler in a run (RUN_FOLDER)",
        metavar="F=1,I=1,W=1,comm=0,unshard=0,reduce=0,offload=0|plan|RUN_FOLDER",
        parse=parse_costs,
    )
    device: str = option(
        "with --costs plan: the device, as for `drawloom plan` (default: this machine's)",
        default="",
        metavar="DEVICE|FILE",
    )
    traced_run: Path | None = option(
        "draw the simulation of a run's schedule with traced costs, and the traced step below it",
        name="--run",
        metavar="RUN_FOLDER",
    )
    channels: Channels = option(
        "messages that wait for each other: none (free), from one rank to another (direction), between two ranks "
        "(pair), all of a rank (rank), or all, while the rank does nothing else (blocking)",
        default="free",
    )
    forward_only: bool = option("simulate evaluation and generation")
    compare: bool = option("print a table of all schedules, and NAME, with the costs of RECIPE if there is one")

    def run(self, project: Project) -> ScheduleResult | ComparisonResult:
        if self.traced_run is not None:
            if any(getattr(self, name) for name in EXCLUDED_BY_RUN):
                raise UserError(
                    "--run takes the schedule from the run's recipe; leave the recipe and its options out", 2
                )
            measured = read_last_traced_step(self.traced_run, project).simulation
            summary = self._simulate_one(project, str(self.traced_run))
            return ScheduleResult.from_summary(attrs.evolve(summary, measured=measured))
        if self.compare:
            return self._compare_schedules(project)
        return ScheduleResult.from_summary(self._simulate_one(project, self.recipe))

    def _make_simulator(self, project: Project, recipe: Recipe | None = None) -> ScheduleSimulator:
        """Return a simulator with the costs of the options."""
        costs = self.costs or self.traced_run or {}
        source = make_cost_source(costs, self.device, project, recipe)
        has_stage_costs = isinstance(source, TracedCosts) and not self.compare and not self.ranks
        return ScheduleSimulator(source, costs, self.channels, self.forward_only, has_stage_costs)

    def _simulate_one(self, project: Project, recipe_name: str) -> Summary:
        """Simulate a recipe's schedule, a schedule by name, or a schedule from a file."""
        ranks, microbatches = (_get_only_value(name, getattr(self, name)) for name in ("ranks", "microbatches"))
        if not recipe_name:
            raise UserError("schedule takes a recipe, a CSV file, the name of a schedule and --ranks, or --compare", 2)
        if recipe_name.endswith(".csv"):
            return self._simulate_csv_file(project, ranks, microbatches)
        if ranks and names_a_recipe(recipe_name, project):
            hint = "leave --ranks out, and write mesh.pipeline=N, or name a schedule instead of the recipe"
            raise UserError(f"--ranks: a recipe has its own number of ranks; {hint}", 2)
        name = recipe_name.removeprefix(FOLDER)
        if ranks:
            find_schedule_name_and_spec(project, name)  # report a misspelt name before missing options
            size = Size(ranks, require_microbatches(microbatches))
            simulator = self._make_simulator(project)
            schedule = self._open_schedule(project, name, simulator, size)
            check_stages_per_rank(self.stages_per_rank, name, schedule, ranks)
            return simulator.simulate_schedule(name, schedule, size)
        if isinstance(project.registry.find(FOLDER + name), Spec):
            raise UserError(f"{recipe_name} is a schedule; write --ranks 4 --microbatches 8", 2)
        if near := suggest_schedule(recipe_name, project):
            text = f"there is no recipe or schedule {recipe_name!r}; did you mean {near!r}"
            raise UserError(f"{text}, with --ranks 4 --microbatches 8?", 2)
        recipe = self._load_and_check_recipe(project, recipe_name)
        pipeline = Pipeline.from_recipe(recipe)
        check_stages_per_rank(self.stages_per_rank, pipeline.use, pipeline.schedule, pipeline.ranks)
        simulator = self._make_simulator(project, recipe)
        is_unit = isinstance(simulator.source, UnitCosts)
        return simulator.simulate_schedule(
            pipeline.use.removeprefix(FOLDER),
            pipeline.schedule,
            Size(pipeline.ranks, require_microbatches(microbatches or pipeline.microbatches)),
            describe_parameter_sharding(recipe.graph) if is_unit else None,
            offloads=offloads_activations(recipe.graph),
        )

    def _load_and_check_recipe(self, project: Project, name: str) -> Recipe:
        """Load and check the recipe; it may need another machine's devices."""
        recipe = self.load_recipe(project, name)
        recipe.check(skip_machine_checks=True)
        return recipe

    def _open_schedule(self, project: Project, name: str, simulator: ScheduleSimulator, size: Size) -> Schedule:
        """Open a schedule by name. With a recipe, node.key=value words belong to the recipe."""
        nodes = {} if self.recipe and names_a_recipe(self.recipe, project) else read_overrides(self.words)
        return open_schedule_by_name(project, name, simulator.source, size, self.stages_per_rank, nodes)

    def _simulate_csv_file(self, project: Project, ranks: int | None, microbatches: int | None) -> Summary:
        """Simulate a schedule from a CSV file. Raises UserError for options in conflict with the file."""
        program, path = read_program_file(Path(self.recipe)), self.recipe
        for name, requested, actual in (
            ("--ranks", ranks, program.ranks),
            ("--microbatches", microbatches, program.microbatches),
            ("--stages-per-rank", self.stages_per_rank, program.stages // program.ranks),
        ):
            if requested not in (None, actual):
                raise UserError(f"{name} {requested}: {path} has {actual}; leave it out", 2)
        return self._make_simulator(project).simulate_program(path, program)

    def _compare_schedules(self, project: Project) -> ComparisonResult:
        """Simulate the named schedule and all schedules without required settings: one table per size."""
        if self.format in ("svg", "csv"):
            raise UserError(f"--format {self.format} shows only one schedule; leave --compare out", 2)
        has_recipe = bool(self.recipe) and names_a_recipe(self.recipe, project)
        recipe = self._load_and_check_recipe(project, self.recipe) if has_recipe else None
        if recipe is None and not self.ranks:
            raise UserError("--compare takes a recipe, or --ranks and --microbatches", 2)
        pipeline = None if recipe is None else Pipeline.from_recipe(recipe)
        simulator = self._make_simulator(project, recipe)
        named = [] if recipe or not self.recipe else [self.recipe.removeprefix(FOLDER)]
        names = list(dict.fromkeys([*list_schedules_without_required_settings(project), *named]))
        ranks = self.ranks or [pipeline.ranks if pipeline else 1]
        microbatches = self.microbatches or [require_microbatches(pipeline.microbatches if pipeline else None)]
        sizes = [Size(count, batches) for count, batches in product(ranks, microbatches)]
        tables = {size: list(self._simulate_suitable_schedules(project, names, simulator, size)) for size in sizes}
        titled = [
            f"{size}\n{format_comparison(rows)}" if len(tables) > 1 else format_comparison(rows)
            for size, rows in tables.items()
        ]
        schedules = [
            ScheduleData(**make_schedule_data_fields(summary)) for summaries in tables.values() for summary in summaries
        ]
        return ComparisonResult(schedules, "\n\n".join([*titled, LEGEND]))

    def _simulate_suitable_schedules(
        self, project: Project, names: Sequence[str], simulator: ScheduleSimulator, size: Size
    ) -> Iterator[Summary]:
        """Simulate the schedules that suit the model. Raises UserError if no schedule does."""
        unsuitable: list[UnsuitableError] = []
        for name in names:
            try:
                schedule = self._open_schedule(project, name, simulator, size)
                yield simulator.simulate_schedule(name, schedule, size)
            except UnsuitableError as error:
                unsuitable.append(error)
        if len(unsuitable) == len(names):
            raise unsuitable[-1]


def _get_only_value(name: str, values: Sequence[int]) -> int | None:
    """Return an option's value, None if it has none. Raises UserError for several."""
    if len(values) > 1:
        text = ",".join(map(str, values))
        raise UserError(f"--{name} {text}: only --compare takes several values; add --compare", 2)
    return values[0] if values else None
