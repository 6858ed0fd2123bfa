"""simulate and draw a pipeline schedule, its bubble and activation memory, without a device"""

import shutil
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import attrs

from drawloom.components.commands._recipes import Pipeline, read_mesh_sizes, require_microbatches
from drawloom.components.distributed.device_model import find_device_model
from drawloom.components.parallel.data_shard import should_gather_per_block
from drawloom.components.pipeline.from_csv import read_program_file
from drawloom.components.pipeline.program.lowering import Sharding
from drawloom.components.pipeline.program.notation import format_program_csv
from drawloom.components.pipeline.program.timing import Costs, CostTable, DeadlockError
from drawloom.components.pipeline.simulation.simulator import Bar, Channels, simulate
from drawloom.components.pipeline.simulation.summary import LEGEND, Summary, format_comparison, format_count
from drawloom.components.pipeline.simulation.svg import draw_svg
from drawloom.components.pipeline.simulation.text import draw_text
from drawloom.components.planning.calibrate import load_local_device_model
from drawloom.components.planning.cost_sources import (
    CostSource,
    PlannedCosts,
    TracedCosts,
    TracedStep,
    UnitCosts,
    read_traced_step,
)
from drawloom.graph.cli.command import (
    JSON,
    Count,
    OverlayCommand,
    Project,
    Recipe,
    Result,
    TextResult,
    UserError,
    argument,
    command,
    internal,
    option,
    output,
    output_class,
)
from drawloom.graph.recipe.loading import RecipeFolder
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.recipe.overrides import read_overrides
from drawloom.graph.registry.registry import Spec
from drawloom.graph.spelling import find_nearest
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
        """
        Return how many slices of the costs, usually layers, every stage has; None for costs of whole stages or without
        slices, and for schedules that divide evenly.
        """
        if self.has_stage_costs or not isinstance(schedule, PartitioningSchedule):
            return None
        slices = self.source.auto_schedule_settings(ranks).get("slices")
        return schedule.layers_by_stage(ranks, len(slices)) if slices else None

    def simulate_program(
        self,
        name: str,
        program: Program,
        sharding: Sharding | None = None,
        slices_by_stage: Sequence[int] | None = None,
    ) -> Summary:
        """Simulate a program, and return the summary with its memory."""
        if isinstance(self.costs, dict):
            if sharding is None and {"unshard", "reduce"} & self.costs.keys():
                sharding = Sharding("unshard" in self.costs)  # without a recipe, parameters are gathered once per step
            if "offload" in self.costs:
                program = attrs.evolve(program, offloaded=program.offloaded or frozenset(range(program.stages)))
        try:
            costs = self.source.stage_costs(
                program.ranks, program.stages // program.ranks, slices_by_stage, program.recompute
            )
        except UserError as error:
            raise UnsuitableError(str(error), error.exit_code) from error
        try:
            simulation = simulate(program, costs, self.channels, sharding)
        except DeadlockError as deadlock:
            raise UserError(f"{name} can't be executed: {deadlock}") from deadlock
        return Summary(name, simulation, self.source.peak_activation_bytes(program, slices_by_stage))


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


FOLDER = "pipeline.schedules."


def names_a_recipe(name: str, project: Project) -> bool:
    """Return whether a name means a recipe: a TOML file, a run folder, or a shipped recipe."""
    is_run = (Path(name) / LOCK).is_file()
    return is_run or name.endswith(".toml") or RecipeFolder(project.recipes).find(name) is not None


def suggest_schedule(name: str, project: Project) -> str | None:
    """Return a schedule with a similar name, or None if the name is, or resembles, a recipe's."""
    folder = RecipeFolder(project.recipes)
    if Path(name).exists() or names_a_recipe(name, project) or find_nearest(name, folder.names):
        return None
    schedules = [use.removeprefix(FOLDER) for use in project.registry.names() if use.startswith(FOLDER)]
    return find_nearest(name, schedules)


def list_schedules_without_required_settings(project: Project) -> Iterator[str]:
    """Yield the names of schedules without required settings."""
    for name in project.registry.names():
        spec = project.registry.find(name) if name.startswith(FOLDER) else None
        if isinstance(spec, Spec) and not any(field.required for field in spec.fields.values()):
            yield name.removeprefix(FOLDER)


@output_class
class ActionData:
    """A gather, a reduction or a copy on a rank."""

    action: str = output("notation of the action")
    start: float = output("start, in the unit of the costs")
    end: float = output("end")


@output_class
class ScheduleData:
    """A simulated schedule; times are in the unit of the costs."""

    schedule: str = output("name, or path of a CSV file")
    ranks: int = output("pipeline ranks")
    stages_per_rank: int = output("stages on each rank")
    microbatches: int = output("microbatches of a step")
    makespan: float = output("time of a step")
    ideal: float = output("time without a bubble")
    bubble: float = output("idle fraction of the makespan")
    span_bubble: float = output("idle fraction of a rank's longest span")
    peak_activations: Sequence[int] = output("peak of stage-microbatches until their input gradients, by rank")
    peak_live_weights: Sequence[int] = output("the same until their weight gradients, by rank")
    messages: int = output("tensors that ranks send one another")
    actions: Mapping[str, int] = output("number of actions by kind")
    shard_actions: Sequence[Sequence[ActionData]] = output("gathers and reductions by rank")
    transfers: Sequence[Sequence[ActionData]] = output("copies of activations to host memory and back by rank")
    choice: str | None = output('schedule that was chosen among others, or "search"')
    recompute: Sequence[str] | None = output("recomputation by stage, if the schedule chooses it")
    measured_makespan: float | None = output("time of the step in a run, with --run only")
    activation_bytes: Sequence[int] | None = output("peak bytes of activations by rank, if known")

    @classmethod
    def from_summary(cls, summary: Summary, /, **fields: Any) -> Self:
        """Return a simulation's data, with a subclass's `fields`."""
        run = summary.simulation
        return cls(
            schedule=summary.schedule,
            ranks=summary.ranks,
            stages_per_rank=summary.stages_per_rank,
            microbatches=run.program.microbatches,
            makespan=run.makespan,
            ideal=run.busiest_rank_compute_time,
            bubble=run.bubble_fraction,
            span_bubble=run.longest_span_bubble_fraction,
            peak_activations=run.peak_activations,
            peak_live_weights=run.peak_microbatches_in_flight,
            messages=run.message_count,
            actions=run.action_counts,
            shard_actions=_list_actions(run.shard_bars),
            transfers=_list_actions(run.transfer_bars),
            choice=run.program.choice or None,
            recompute=[*map(str, run.program.recompute)] or None,
            measured_makespan=summary.measured.makespan if summary.measured else None,
            activation_bytes=summary.memory and list(summary.memory),
            **fields,
        )


@attrs.frozen
class ScheduleResult(ScheduleData, Result):
    """A simulated schedule; times are in the unit of the costs."""

    formats: ClassVar[tuple[str, ...]] = ("text", "svg", JSON, "csv")

    summary: Summary = internal()

    def render(self, format: str) -> str:
        """Return a timeline with a table, an SVG document, or a CSV file of torch.distributed.pipelining."""
        summary = self.summary
        if format == "svg":
            return draw_svg(summary.simulation, summary.title, summary.caption, summary.measured).removesuffix("\n")
        if format == "csv":
            return format_program_csv(summary.simulation.program).removesuffix("\r\n")
        width = shutil.get_terminal_size((120, 0)).columns
        picture = draw_text(summary.simulation, width, summary.measured).removesuffix("\n")
        return f"{summary.title}\n{summary.caption}\n\n{summary.format_peaks_by_rank()}\n\n{picture}"


@output_class
class ComparisonResult(TextResult):
    """Simulated schedules, with --compare."""

    schedules: Sequence[ScheduleData] = output("schedules of every size")


def _list_actions(bars_by_rank: Sequence[Sequence[Bar]]) -> list[list[ActionData]]:
    return [[ActionData(str(bar.action), bar.start, bar.end) for bar in bars] for bars in bars_by_rank]


EXCLUDED_BY_RUN = "recipe", "words", "overlay", "ranks", "microbatches", "compare"
"""Options that --run rejects, because they would simulate a different run."""


@command
class ScheduleCommand(OverlayCommand):
    """A simulation for one schedule, or for all schedules."""

    epilog: ClassVar[str] = (
        "Set single values with node.key=value; in a schedule by its name, the node is called schedule, as in "
        "schedule.stages_per_rank=2."
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
    compare: bool = option("print a table of all schedules, and NAME, with the costs of RECIPE if there is one")

    def run(self, project: Project) -> ScheduleResult | ComparisonResult:
        if self.traced_run is not None:
            if any(getattr(self, name) for name in EXCLUDED_BY_RUN):
                raise UserError(
                    "--run takes the schedule from the run's recipe; leave the recipe and its options out", 2
                )
            measured = read_last_traced_step(self.traced_run, project).simulation
            summary = attrs.evolve(self._simulate_one(project, str(self.traced_run)), measured=measured)
        elif self.compare:
            return self._compare_schedules(project)
        else:
            summary = self._simulate_one(project, self.recipe)
        return ScheduleResult.from_summary(summary, summary=summary)

    def _make_simulator(self, project: Project, recipe: Recipe | None = None) -> ScheduleSimulator:
        """Return a simulator with the costs of the options."""
        costs = self.costs or self.traced_run or {}
        source = make_cost_source(costs, self.device, project, recipe)
        has_stage_costs = isinstance(source, TracedCosts) and not self.compare and not self.ranks
        return ScheduleSimulator(source, costs, self.channels, has_stage_costs)

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
            project.registry.require(
                name if "." in name else FOLDER + name
            )  # report a misspelt name before missing options
            size = Size(ranks, require_microbatches(microbatches))
            simulator = self._make_simulator(project)
            schedule = self._open_schedule(project, name, simulator, size)
            return simulator.simulate_schedule(name, schedule, size)
        if isinstance(project.registry.find(FOLDER + name), Spec):
            raise UserError(f"{recipe_name} is a schedule; write --ranks 4 --microbatches 8", 2)
        if near := suggest_schedule(recipe_name, project):
            text = f"there is no recipe or schedule {recipe_name!r}; did you mean {near!r}"
            raise UserError(f"{text}, with --ranks 4 --microbatches 8?", 2)
        recipe = self._load_and_check_recipe(project, recipe_name)
        pipeline = Pipeline.from_recipe(recipe)
        simulator = self._make_simulator(project, recipe)
        is_unit = isinstance(simulator.source, UnitCosts)
        return simulator.simulate_schedule(
            pipeline.use.removeprefix(FOLDER),
            pipeline.schedule,
            Size(pipeline.ranks, require_microbatches(microbatches or pipeline.microbatches)),
            describe_parameter_sharding(recipe.graph) if is_unit else None,
            offloads=any(node.spec.use == "pipeline.offloaded" for node in recipe.graph.nodes.values()),
        )

    def _load_and_check_recipe(self, project: Project, name: str) -> Recipe:
        """Load and check the recipe; it may need another machine's devices."""
        recipe = self.load_recipe(project, name)
        recipe.check(skip_machine_checks=True)
        return recipe

    def _open_schedule(self, project: Project, name: str, simulator: ScheduleSimulator, size: Size) -> Schedule:
        """
        Open a schedule by name, with costs and microbatches if it has such settings.

        With a recipe, node.key=value words belong to the recipe, else to the schedule and other nodes.
        """
        nodes = {} if self.recipe and names_a_recipe(self.recipe, project) else read_overrides(self.words)
        use = name if "." in name else FOLDER + name
        spec = project.registry.require(use)
        try:
            data = {"use": use, **choose_cost_settings_of_schedule(spec.fields, simulator.source, size.ranks)}
        except UserError as error:
            raise UnsuitableError(str(error), error.exit_code) from error
        if "microbatches" in spec.fields:
            data["microbatches"] = size.microbatches
        data |= nodes.get("schedule", {})
        recipe = Recipe.of({**nodes, "schedule": data}, "command line", project=project)
        with recipe.open("schedule") as opened:
            if "schedule" not in recipe.graph.implementers(Schedule):
                raise UserError(f"{use} is not a schedule; `drawloom list pipeline.schedules` shows all", 2)
            schedule: Schedule = opened["schedule"]
        return schedule

    def _simulate_csv_file(self, project: Project, ranks: int | None, microbatches: int | None) -> Summary:
        """Simulate a schedule from a CSV file. Raises UserError for options in conflict with the file."""
        program, path = read_program_file(Path(self.recipe)), self.recipe
        for name, requested, actual in (
            ("--ranks", ranks, program.ranks),
            ("--microbatches", microbatches, program.microbatches),
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
        schedules = [ScheduleData.from_summary(summary) for summaries in tables.values() for summary in summaries]
        return ComparisonResult("\n\n".join([*titled, LEGEND]), schedules)

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
