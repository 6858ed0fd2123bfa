"""simulate and draw a pipeline schedule, its bubble and activation memory, without a device"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import get_args

import attrs

from drawloom.components.commands import _costs
from drawloom.components.commands._options import make_integer_parser, parse_positive_integers
from drawloom.components.commands._recipes import Pipeline, add_overlay_option, require_microbatches
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
    Size,
    UnsuitableError,
    check_and_simulate_schedule,
    describe_parameter_sharding,
    offloads_activations,
    simulate_and_summarize,
)
from drawloom.components.pipeline.from_csv import read_program_file
from drawloom.components.pipeline.simulation.contention import Channels
from drawloom.components.pipeline.simulation.summary import LEGEND, Summary, format_comparison
from drawloom.components.planning.cost_sources import CostSource, UnitCosts
from drawloom.graph import UserError
from drawloom.graph.project import Project, Recipe
from drawloom.graph.registry.spec import Spec


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
    costs += (
        "gradients (reduce), and with pipeline.offloaded a copy of activations to host memory or back (offload); or "
    )
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
    if options.ranks and names_a_recipe(options.recipe, project):
        hint = "leave --ranks out, and write mesh.pipeline=N, or name a schedule instead of the recipe"
        raise UserError(f"--ranks: a recipe has its own number of ranks; {hint}", 2)
    if options.ranks:
        name = options.recipe.removeprefix(FOLDER)
        find_schedule_name_and_spec(project, name)  # report a misspelt name before missing options
        size = Size(options.ranks, require_microbatches(options.microbatches))
        source = _costs.make_cost_source(options, project, None)
        return check_and_simulate_schedule(
            options, name, open_schedule_by_name(options, project, name, source, size), size, source
        )
    if isinstance(project.registry.find(FOLDER + options.recipe.removeprefix(FOLDER)), Spec):
        raise UserError(f"{options.recipe} is a schedule; write --ranks 4 --microbatches 8", 2)
    if near := suggest_schedule(options.recipe, project):
        text = f"there is no recipe or schedule {options.recipe!r}; did you mean {near!r}"
        raise UserError(f"{text}, with --ranks 4 --microbatches 8?", 2)
    recipe = _load_and_check_recipe(options, project)
    pipeline = Pipeline.from_recipe(recipe)
    check_stages_per_rank(options, pipeline.use, pipeline.schedule, pipeline.ranks)
    size = Size(pipeline.ranks, require_microbatches(options.microbatches or pipeline.microbatches))
    source = _costs.make_cost_source(options, project, recipe)
    sharding = describe_parameter_sharding(recipe.graph) if isinstance(source, UnitCosts) else None
    return check_and_simulate_schedule(
        options,
        pipeline.use.removeprefix(FOLDER),
        pipeline.schedule,
        size,
        source,
        sharding,
        offloads=offloads_activations(recipe.graph),
    )


def _load_and_check_recipe(options: argparse.Namespace, project: Project) -> Recipe:
    """Load and check the recipe; it may need another machine's devices."""
    recipe = Recipe.load(options.recipe, *options.words, overlays=options.overlay, project=project)
    recipe.check(skip_machine_checks=True)
    return recipe


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
    return simulate_and_summarize(options, path, program, _costs.make_cost_source(options, project, None), None)


def _compare_schedules(options: argparse.Namespace, project: Project) -> ComparisonResult:
    """Simulate the named schedule and all schedules without required settings: one table per size."""
    if options.format in ("svg", "csv"):
        raise UserError(f"--format {options.format} shows only one schedule; leave --compare out", 2)
    recipe = (
        _load_and_check_recipe(options, project) if options.recipe and names_a_recipe(options.recipe, project) else None
    )
    if recipe is None and not options.ranks:
        raise UserError("--compare takes a recipe, or --ranks and --microbatches", 2)
    pipeline = None if recipe is None else Pipeline.from_recipe(recipe)
    source = _costs.make_cost_source(options, project, recipe)
    named = [] if recipe or not options.recipe else [options.recipe.removeprefix(FOLDER)]
    names = list(dict.fromkeys([*list_schedules_without_required_settings(project), *named]))
    ranks = options.ranks or [pipeline.ranks if pipeline else 1]
    microbatches = options.microbatches or [require_microbatches(pipeline.microbatches if pipeline else None)]
    sizes = [Size(count, batches) for count, batches in product(ranks, microbatches)]
    tables = {size: list(_simulate_suitable_schedules(options, project, names, source, size)) for size in sizes}
    titled = [
        f"{size}\n{format_comparison(rows)}" if len(tables) > 1 else format_comparison(rows)
        for size, rows in tables.items()
    ]
    schedules = [
        ScheduleData(**make_schedule_data_fields(summary)) for summaries in tables.values() for summary in summaries
    ]
    return ComparisonResult(schedules, "\n\n".join([*titled, LEGEND]))


def _simulate_suitable_schedules(
    options: argparse.Namespace, project: Project, names: Sequence[str], source: CostSource, size: Size
) -> Iterator[Summary]:
    """Simulate the schedules that suit the model. Raises UserError if no schedule does."""
    unsuitable: list[UnsuitableError] = []
    for name in names:
        try:
            schedule = open_schedule_by_name(options, project, name, source, size, accepts_any_stages_per_rank=True)
            yield check_and_simulate_schedule(options, name, schedule, size, source)
        except UnsuitableError as error:
            unsuitable.append(error)
    if len(unsuitable) == len(names):
        raise unsuitable[-1]
