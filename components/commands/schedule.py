"""simulate and draw a pipeline schedule, its bubble and activation memory, without a device"""

import argparse
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, get_args

import attrs

from drawloom.components.commands import _costs
from drawloom.components.commands._options import make_integer_parser, parse_positive_integers
from drawloom.components.commands._recipes import Pipeline, add_overlay_option, read_mesh_sizes, require_microbatches
from drawloom.components.parallel.data_shard import should_gather_per_block
from drawloom.components.pipeline.from_csv import read_program_file
from drawloom.components.pipeline.program.builders import build_forward_only_program
from drawloom.components.pipeline.program.lowering import Sharding
from drawloom.components.pipeline.program.notation import format_program_csv
from drawloom.components.pipeline.program.timing import DeadlockError
from drawloom.components.pipeline.simulation.contention import Channels
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.pipeline.simulation.summary import LEGEND, Summary, format_comparison, format_count
from drawloom.components.pipeline.simulation.svg import draw_svg
from drawloom.components.pipeline.simulation.text import draw_text
from drawloom.components.planning.cost_sources import CostSource, TracedCosts, UnitCosts
from drawloom.components.ports.pipeline import PartitioningSchedule, Schedule
from drawloom.components.ports.program import Program
from drawloom.graph import Problem, RecipeError, UserError
from drawloom.graph.cli.result import JSON, Result, internal, output, output_class
from drawloom.graph.problems import find_nearest
from drawloom.graph.project import Project, Recipe
from drawloom.graph.recipe.loading import RecipeFolder
from drawloom.graph.recipe.lockfile import LOCK
from drawloom.graph.recipe.overrides import read_overrides
from drawloom.graph.registry.spec import Spec
from drawloom.graph.wiring.graph import Graph

FOLDER = "pipeline.schedules."

# The largest schedule takes about 5 s to simulate; the picture grows with the square of the ranks.
MAX_RANKS, MAX_WORK = 1000, 50_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line arguments."""
    known = "a recipe; with --ranks also the name of a schedule, or a CSV file of torch.distributed.pipelining"
    parser.add_argument("recipe", nargs="?", metavar="RECIPE|NAME|FILE", help=known)
    add_overlay_option(parser)
    help = "pipeline ranks (default: the recipe's); with --compare also several, such as 4,8"
    parser.add_argument("--ranks", type=parse_positive_integers, metavar="N", help=help)
    help = "microbatches per step (default: the recipe's); with --compare also several, such as 4,8"
    parser.add_argument("--microbatches", type=parse_positive_integers, metavar="N", help=help)
    parser.add_argument(
        "--stages-per-rank", type=make_integer_parser(), metavar="N", help="stages per rank (default: the schedule's)"
    )
    known = "F=1,I=1,W=1,comm=0,unshard=0,reduce=0,offload=0|plan|RUN_FOLDER"
    costs = (
        "costs of a rank's layers in any unit: forward (F), input gradients (I), weight gradients (W), whole backward "
    )
    costs += "(B, default I + W), a message (comm), with mesh.data_shard gathering parameters (unshard) and reducing "
    costs += "gradients (reduce), and with stages.offload a copy of activations to host memory or back (offload); or "
    costs += "seconds: planned (plan), or traced by listeners.profiler in a run (RUN_FOLDER)"
    parser.add_argument("--costs", type=_costs.parse_costs, metavar=known, help=costs)
    devices = "with --costs plan: the device, as for `drawloom plan` (default: this machine's)"
    parser.add_argument("--device", metavar="DEVICE|FILE", help=devices)
    help = "draw the simulation of a run's schedule with traced costs, and the traced step below it"
    parser.add_argument("--run", type=Path, metavar="RUN_FOLDER", help=help)
    help = "messages that wait for each other: none (free, default), from one rank to another (direction), between two "
    help += "ranks (pair), all of a rank (rank), or all, while the rank does nothing else (blocking)"
    parser.add_argument("--channels", choices=get_args(Channels), default="free", help=help)
    parser.add_argument("--forward-only", action="store_true", help="simulate evaluation and generation")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="print a table of all schedules, and NAME, with the costs of RECIPE if there is one",
    )
    parser.epilog = "Set single values with node.key=value; in a schedule by its name, the node is called schedule."


EXCLUDED_BY_RUN = "recipe", "words", "overlay", "ranks", "microbatches", "stages_per_rank", "forward_only", "compare"
"""Options that --run rejects, because they would simulate a different run."""


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
    recompute: Sequence[str] | None = output("recomputation by stage, if the schedule chooses it", default=None)
    measured_makespan: float | None = output("time of the step in a run, with --run only", default=None)
    activation_bytes: Sequence[int] | None = output("peak bytes of activations by rank, if known", default=None)


@attrs.frozen
class ScheduleResult(ScheduleData, Result):
    """A simulated schedule; times are in the unit of the costs."""

    formats: ClassVar[tuple[str, ...]] = ("text", "svg", JSON, "csv")

    summary: Summary | None = internal(default=None)

    @classmethod
    def from_summary(cls, summary: Summary) -> "ScheduleResult":
        """Make the result for a simulation's summary."""
        return cls(**_make_schedule_data_fields(summary), summary=summary)

    def render(self, format: str) -> str:
        """Return a timeline with a table, an SVG document, or a CSV file of torch.distributed.pipelining."""
        summary = self.summary
        if summary is None:
            return ""
        if format == "svg":
            return draw_svg(summary.simulation, summary.title, summary.caption, summary.measured).removesuffix("\n")
        if format == "csv":
            return format_program_csv(summary.simulation.program).removesuffix("\r\n")
        width = shutil.get_terminal_size((120, 0)).columns
        picture = draw_text(summary.simulation, width, summary.measured).removesuffix("\n")
        return f"{summary.title}\n{summary.caption}\n\n{summary.format_peaks_by_rank()}\n\n{picture}"


@output_class
class ComparisonResult(Result):
    """Simulated schedules, with --compare."""

    schedules: Sequence[ScheduleData] = output("schedules of every size")
    text: str = internal()

    def render(self, format: str) -> str:
        """Return one table per size."""
        return self.text


def _make_schedule_data_fields(summary: Summary) -> dict[str, Any]:
    """Return a simulation's fields for `ScheduleData`."""
    data = summary.as_data()
    sides = ("shard_actions", "transfers")
    return data | {name: [[ActionData(**bar) for bar in bars] for bars in data[name]] for name in sides}


def main(options: argparse.Namespace, project: Project) -> ScheduleResult | ComparisonResult:
    """Simulate one schedule, or all schedules."""
    options.costs = {} if options.costs is None else options.costs
    if options.run is not None:
        if any(getattr(options, name) for name in EXCLUDED_BY_RUN):
            raise UserError("--run takes the schedule from the run's recipe; leave the recipe and its options out", 2)
        options.recipe, options.costs = str(options.run), options.costs or options.run
    if options.compare:
        return _compare_schedules(options, project)
    for name in ("ranks", "microbatches"):
        values = getattr(options, name) or [None]
        if len(values) > 1:
            raise UserError(
                f"--{name} {','.join(map(str, values))}: only --compare takes several values; add --compare", 2
            )
        setattr(options, name, values[0])
    summary = _simulate_requested_schedule(options, project)
    measured = None if options.run is None else _costs.read_last_traced_step(options.run, project).simulation
    return ScheduleResult.from_summary(summary if measured is None else attrs.evolve(summary, measured=measured))


def _simulate_requested_schedule(options: argparse.Namespace, project: Project) -> Summary:
    """Simulate a recipe's schedule, a schedule by name, or a schedule from a file."""
    if not options.recipe:
        raise UserError("schedule takes a recipe, a CSV file, the name of a schedule and --ranks, or --compare", 2)
    if options.recipe.endswith(".csv"):
        return _simulate_csv_file(options, project)
    if options.ranks and _names_a_recipe(options.recipe, project):
        hint = "leave --ranks out, and write mesh.pipeline=N, or name a schedule instead of the recipe"
        raise UserError(f"--ranks: a recipe has its own number of ranks; {hint}", 2)
    if options.ranks:
        name = options.recipe.removeprefix(FOLDER)
        _find_schedule_name_and_spec(project, name)  # report a misspelt name before missing options
        size = Size(options.ranks, require_microbatches(options.microbatches))
        source = _costs.make_cost_source(options, project, None)
        return _check_and_simulate_schedule(
            options, name, _open_schedule_by_name(options, project, name, source, size), size, source
        )
    if isinstance(project.registry.find(FOLDER + options.recipe.removeprefix(FOLDER)), Spec):
        raise UserError(f"{options.recipe} is a schedule; write --ranks 4 --microbatches 8", 2)
    if near := _suggest_schedule(options.recipe, project):
        text = f"there is no recipe or schedule {options.recipe!r}; did you mean {near!r}"
        raise UserError(f"{text}, with --ranks 4 --microbatches 8?", 2)
    recipe = _load_and_check_recipe(options, project)
    pipeline = Pipeline.from_recipe(recipe)
    _check_stages_per_rank(options, pipeline.use, pipeline.schedule, pipeline.ranks)
    size = Size(pipeline.ranks, require_microbatches(options.microbatches or pipeline.microbatches))
    source = _costs.make_cost_source(options, project, recipe)
    sharding = _describe_parameter_sharding(recipe.graph) if isinstance(source, UnitCosts) else None
    return _check_and_simulate_schedule(
        options,
        pipeline.use.removeprefix(FOLDER),
        pipeline.schedule,
        size,
        source,
        sharding,
        offloads=_offloads_activations(recipe.graph),
    )


def _load_and_check_recipe(options: argparse.Namespace, project: Project) -> Recipe:
    """Load and check the recipe; it may need another machine's devices."""
    recipe = Recipe.load(options.recipe, *options.words, overlays=options.overlay, project=project)
    recipe.check(skip_machine_checks=True)
    return recipe


def _names_a_recipe(name: str, project: Project) -> bool:
    """Return whether a name means a recipe: a TOML file, a run folder, or a shipped recipe."""
    is_run = (Path(name) / LOCK).is_file()
    return is_run or name.endswith(".toml") or RecipeFolder(project.recipes).find(name) is not None


def _suggest_schedule(name: str, project: Project) -> str | None:
    """Return a schedule with a similar name, or None if the name is, or resembles, a recipe's."""
    folder = RecipeFolder(project.recipes)
    if Path(name).exists() or _names_a_recipe(name, project) or find_nearest(name, folder.names):
        return None
    schedules = [use.removeprefix(FOLDER) for use in project.registry.names() if use.startswith(FOLDER)]
    return find_nearest(name, schedules)


def _simulate_csv_file(options: argparse.Namespace, project: Project) -> Summary:
    """Simulate a schedule from a CSV file. Raises UserError for options in conflict with the file."""
    program, path = read_program_file(Path(options.recipe)), options.recipe
    for option, requested, actual in (
        ("--ranks", options.ranks, program.ranks),
        ("--microbatches", options.microbatches, program.microbatches),
        ("--stages-per-rank", options.stages_per_rank, program.stages // program.ranks),
    ):
        if requested not in (None, actual):
            raise UserError(f"{option} {requested}: {path} has {actual}; leave it out", 2)
    return _simulate_and_summarize(options, path, program, _costs.make_cost_source(options, project, None), None)


def _compare_schedules(options: argparse.Namespace, project: Project) -> ComparisonResult:
    """Simulate the named schedule and all schedules without required settings: one table per size."""
    if options.format in ("svg", "csv"):
        raise UserError(f"--format {options.format} shows only one schedule; leave --compare out", 2)
    recipe = (
        _load_and_check_recipe(options, project)
        if options.recipe and _names_a_recipe(options.recipe, project)
        else None
    )
    if recipe is None and not options.ranks:
        raise UserError("--compare takes a recipe, or --ranks and --microbatches", 2)
    pipeline = None if recipe is None else Pipeline.from_recipe(recipe)
    source = _costs.make_cost_source(options, project, recipe)
    named = [] if recipe or not options.recipe else [options.recipe.removeprefix(FOLDER)]
    names = list(dict.fromkeys([*_list_schedules_without_required_settings(project), *named]))
    ranks = options.ranks or [pipeline.ranks if pipeline else 1]
    microbatches = options.microbatches or [require_microbatches(pipeline.microbatches if pipeline else None)]
    sizes = [Size(count, batches) for count, batches in product(ranks, microbatches)]
    tables = {size: list(_simulate_suitable_schedules(options, project, names, source, size)) for size in sizes}
    titled = [
        f"{size}\n{format_comparison(rows)}" if len(tables) > 1 else format_comparison(rows)
        for size, rows in tables.items()
    ]
    schedules = [
        ScheduleData(**_make_schedule_data_fields(summary)) for summaries in tables.values() for summary in summaries
    ]
    return ComparisonResult(schedules, "\n\n".join([*titled, LEGEND]))


def _simulate_suitable_schedules(
    options: argparse.Namespace, project: Project, names: Sequence[str], source: CostSource, size: "Size"
) -> Iterator[Summary]:
    """Simulate the schedules that suit the model. Raises UserError if no schedule does."""
    unsuitable: list[_UnsuitableError] = []
    for name in names:
        try:
            schedule = _open_schedule_by_name(options, project, name, source, size, accepts_any_stages_per_rank=True)
            yield _check_and_simulate_schedule(options, name, schedule, size, source)
        except _UnsuitableError as error:
            unsuitable.append(error)
    if len(unsuitable) == len(names):
        raise unsuitable[-1]


def _list_schedules_without_required_settings(project: Project) -> Iterator[str]:
    """Yield the names of schedules without required settings."""
    for name in project.registry.names():
        spec = project.registry.find(name) if name.startswith(FOLDER) else None
        if isinstance(spec, Spec) and not any(field.required for field in spec.fields.values()):
            yield name.removeprefix(FOLDER)


def _find_schedule_name_and_spec(project: Project, name: str) -> tuple[str, Spec]:
    """Return a schedule's full name and component. Raises RecipeError for an unknown name."""
    use = name if "." in name else FOLDER + name
    spec = project.registry.find(use)
    if isinstance(spec, Problem):
        raise RecipeError([spec])
    return use, spec


def _open_schedule_by_name(
    options: argparse.Namespace,
    project: Project,
    name: str,
    source: CostSource,
    size: "Size",
    *,
    accepts_any_stages_per_rank: bool = False,
) -> Schedule:
    """Open a schedule by name, with costs, stages per rank and microbatches if it has such settings.

    Raises UserError if the schedule has another number of stages per rank, unless `accepts_any_stages_per_rank`.
    """
    use, spec = _find_schedule_name_and_spec(project, name)
    try:
        data: dict[str, Any] = {"use": use, **_costs.choose_cost_settings_of_schedule(spec.fields, source, size.ranks)}
    except UserError as error:
        raise _UnsuitableError(str(error), error.exit_code) from error
    if "stages_per_rank" in spec.fields and options.stages_per_rank:
        data["stages_per_rank"] = options.stages_per_rank
    if "microbatches" in spec.fields:
        data["microbatches"] = size.microbatches
    # With a recipe, node.key=value words belong to the recipe.
    words = {} if options.recipe and _names_a_recipe(options.recipe, project) else read_overrides(options.words)
    nodes = {**words, "schedule": {**data, **words.get("schedule", {})}}
    recipe = Recipe.of(nodes, "command line", project=project)
    with recipe.open("schedule") as opened:
        if "schedule" not in recipe.graph.implementers(Schedule):
            raise UserError(f"{use} is not a schedule; `drawloom list pipeline.schedules` shows all", 2)
        schedule: Schedule = opened["schedule"]
    if not accepts_any_stages_per_rank:
        _check_stages_per_rank(options, name, schedule, size.ranks)
    return schedule


def _check_stages_per_rank(options: argparse.Namespace, name: str, schedule: Schedule, ranks: int) -> None:
    """Raise UserError if the schedule's stages per rank differ from --stages-per-rank."""
    if options.stages_per_rank is None:
        return
    if options.stages_per_rank != (stages := len(schedule.stage_to_rank(ranks)) // ranks):
        has = f"{name} has {stages} stages per rank"
        raise UserError(f"--stages-per-rank {options.stages_per_rank}: {has}; leave it out", 2)


@attrs.frozen
class Size:
    """Number of pipeline ranks, and of microbatches per step."""

    ranks: int
    microbatches: int

    def __str__(self) -> str:
        return f"{format_count(self.ranks, 'rank')}, {format_count(self.microbatches, 'microbatch', 'es')}"


class _UnsuitableError(UserError):
    """Error for a schedule with more stages than the model has layers, or that does not fit in memory."""


def _check_and_simulate_schedule(
    options: argparse.Namespace,
    name: str,
    schedule: Schedule,
    size: Size,
    source: CostSource,
    sharding: Sharding | None = None,
    *,
    offloads: bool = False,
) -> Summary:
    """Simulate a schedule. Raises UserError if it is too large, _UnsuitableError if it does not suit the model."""
    ranks, microbatches = size.ranks, size.microbatches
    try:
        stages = len(schedule.stage_to_rank(ranks)) // ranks if ranks <= MAX_RANKS else 1
    except UserError as error:
        raise _UnsuitableError(str(error), error.exit_code) from error
    if ranks > MAX_RANKS or ranks * microbatches * stages > MAX_WORK:
        large = f"{ranks} ranks with {microbatches} microbatches on {stages} stages each"
        limits = f"{MAX_RANKS} ranks, and {MAX_WORK} microbatches times ranks times stages"
        raise UserError(f"{large} take too long to simulate; write at most {limits}", 2)
    program = schedule.program(ranks, microbatches)
    if offloads:
        program = attrs.evolve(program, offloaded=frozenset(range(program.stages)))
    return _simulate_and_summarize(
        options, name, program, source, sharding, _count_model_slices_by_stage(options, schedule, ranks, source)
    )


def _count_model_slices_by_stage(
    options: argparse.Namespace, schedule: Schedule, ranks: int, source: CostSource
) -> Sequence[int] | None:
    """Return the model slice count per stage, or None if the schedule or the costs do not define slices."""
    # The trace of a recipe's own run has the costs of whole stages.
    has_stage_costs = isinstance(source, TracedCosts) and not options.compare and not options.ranks
    if has_stage_costs or not isinstance(schedule, PartitioningSchedule):
        return None
    slices = source.auto_schedule_settings(ranks).get("slices")
    return schedule.layers_by_stage(ranks, len(slices)) if slices else None


def _simulate_and_summarize(
    options: argparse.Namespace,
    name: str,
    program: Program,
    source: CostSource,
    sharding: Sharding | None,
    sizes: Sequence[int] | None = None,
) -> Summary:
    """Simulate a program with the source's costs, and return the summary with its memory."""
    if options.forward_only:
        program, sharding = build_forward_only_program(program.stage_to_rank, program.microbatches), None
    elif isinstance(options.costs, dict):
        if sharding is None and {"unshard", "reduce"} & options.costs.keys():
            sharding = Sharding("unshard" in options.costs)  # without a recipe, parameters are gathered once per step
        if "offload" in options.costs:
            program = attrs.evolve(program, offloaded=program.offloaded or frozenset(range(program.stages)))
    try:
        costs = source.stage_costs(program.ranks, program.stages // program.ranks, sizes, program.recompute)
    except UserError as error:
        raise _UnsuitableError(str(error), error.exit_code) from error
    try:
        simulation = simulate(program, costs, options.channels, sharding)
    except DeadlockError as deadlock:
        raise UserError(f"{name} can't be executed: {deadlock}") from deadlock
    return Summary(name, simulation, None if options.forward_only else source.peak_activation_bytes(program, sizes))


def _offloads_activations(graph: Graph) -> bool:
    """Return whether stages offload activations to host memory."""
    return any(node.settings.get("offload") for node in graph.nodes.values() if "recompute" in node.settings)


def _describe_parameter_sharding(graph: Graph) -> Sharding | None:
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
