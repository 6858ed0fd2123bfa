"""simulate and draw a pipeline schedule with its bubble and activation memory, without a device"""

import argparse
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from drawloom.components.commands._options import integer
from drawloom.components.pipeline.from_csv import read_file
from drawloom.components.pipeline.program.builders import forward_only
from drawloom.components.pipeline.program.lowering import Sharding
from drawloom.components.pipeline.program.notation import write_csv
from drawloom.components.pipeline.program.timing import Costs, Deadlock
from drawloom.components.pipeline.simulation.contention import Channels
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.pipeline.simulation.summary import Summary, compare
from drawloom.components.pipeline.simulation.svg import draw_svg
from drawloom.components.pipeline.simulation.text import draw_text
from drawloom.components.pipeline.stage_checks import gathers_by_block
from drawloom.components.ports.distributed import DATA, SHARDS, Mesh
from drawloom.components.ports.pipeline import Schedule
from drawloom.components.ports.program import Program
from drawloom.graph import Problem, RecipeError, UserError
from drawloom.graph.build.graph import Graph
from drawloom.graph.cli.terminal import print_text
from drawloom.graph.project import Project, Recipe
from drawloom.graph.recipe.loading import RecipeFolder
from drawloom.graph.recipe.overrides import read_overrides
from drawloom.graph.registry.spec import Spec

FOLDER = "pipeline.schedules."

# The largest schedule takes about 5 s to simulate; the picture grows with the square of ranks.
MOST_RANKS, MOST_WORK = 1000, 50_000

MOST_COST = 1e9  # sums of costs have to be finite, and differences of small ones to be seen beside them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    known = "a recipe, with --ranks a schedule, or a CSV file of torch.distributed.pipelining"
    parser.add_argument("recipe", nargs="?", metavar="RECIPE|NAME|FILE", help=known)
    parser.add_argument("--overlay", action="append", default=[], metavar="FILE", help="a recipe to merge over it")
    parser.add_argument("--ranks", type=integer(), metavar="N", help="pipeline ranks; the recipe's mesh if left out")
    parser.add_argument("--microbatches", type=integer(), metavar="N", help="in a step; the recipe's batch if left out")
    parser.add_argument("--stages-per-rank", type=integer(), metavar="N", help="the schedule's own number if left out")
    known = "F=1,I=1,W=1,comm=0,unshard=0,reduce=0"
    costs = "B is I + W if left out; with mesh.data_shard, unshard gathers a stage, and reduce its gradients"
    parser.add_argument("--costs", type=_costs, default={}, metavar=known, help=costs)
    parser.add_argument(
        "--channels", choices=get_args(Channels), default="free", help="which messages contend for a channel"
    )
    parser.add_argument("--format", choices=("text", "svg", "json", "csv"), default="text", help="text if left out")
    parser.add_argument("--forward-only", action="store_true", help="the program of evaluation and generation")
    parser.add_argument("--compare", action="store_true", help="a table of all schedules, and of NAME")
    parser.epilog = "Single values are set by node.key=value; in a schedule by its name, the node is called schedule."


def main(options: argparse.Namespace, project: Project) -> int:
    """Print one schedule, or a comparison of all."""
    if options.compare:
        print_text(_comparison(options, project))
        return 0
    summary = _summary(options, project)
    if options.format == "json":
        print_text(json.dumps(summary.as_data(), indent=1))
    elif options.format == "svg":
        print_text(draw_svg(summary.simulation, summary.title, summary.caption), end="")
    elif options.format == "csv":
        print_text(write_csv(summary.simulation.program), end="")
    else:
        print_text(f"{summary.title}\n{summary.caption}\n\n{summary.by_rank()}\n")
        print_text(draw_text(summary.simulation, shutil.get_terminal_size((120, 0)).columns), end="")
    return 0


def _summary(options: argparse.Namespace, project: Project) -> Summary:
    """The simulation of the schedule of a recipe, of a schedule by name, or of one in a file."""
    if not options.recipe:
        raise UserError("schedule takes a recipe, a CSV file, the name of a schedule and --ranks, or --compare", 2)
    if options.recipe.endswith(".csv"):
        return _of_file(options)
    if options.ranks and _is_recipe(options.recipe, project):
        hint = "leave --ranks out, and write mesh.pipeline=N, or name a schedule instead of the recipe"
        raise UserError(f"--ranks: a recipe has its own number of ranks; {hint}", 2)
    if options.ranks:
        name = options.recipe.removeprefix(FOLDER)
        schedule = _by_name(options, project, name)
        return _simulated(options, name, schedule, options.ranks, _needed(options.microbatches), _costed(options))
    if isinstance(project.registry.find(FOLDER + options.recipe.removeprefix(FOLDER)), Spec):
        raise UserError(f"{options.recipe} is a schedule; write --ranks 4 --microbatches 8", 2)
    recipe = Recipe.load(options.recipe, *options.words, overlays=options.overlay, project=project)
    recipe.check()
    graph = recipe.graph
    name = only(graph, Schedule)
    ranks = graph.nodes[only(graph, Mesh)].settings.get("pipeline", 1)
    with recipe.open(name) as opened:
        schedule = opened.get(Schedule)
    _check_stages(options, name, schedule, ranks)
    use = graph.nodes[name].spec.use.removeprefix(FOLDER)
    count = options.microbatches or microbatches_of(graph)
    return _simulated(options, use, schedule, ranks, count, _sharding(graph) or _costed(options))


def _is_recipe(name: str, project: Project) -> bool:
    return name.endswith(".toml") or RecipeFolder(project.recipes).find(name) is not None


def _of_file(options: argparse.Namespace) -> Summary:
    program, path = read_file(Path(options.recipe)), options.recipe
    for option, given, held in (
        ("--ranks", options.ranks, program.ranks),
        ("--microbatches", options.microbatches, program.microbatches),
        ("--stages-per-rank", options.stages_per_rank, program.stages // program.ranks),
    ):
        if given not in (None, held):
            raise UserError(f"{option} {given}: {path} has {held}; leave it out", 2)
    if options.forward_only:
        program = forward_only(program.stage_to_rank, program.microbatches)
    return _simulated_program(options, path, program, None if options.forward_only else _costed(options))


def _comparison(options: argparse.Namespace, project: Project) -> str:
    """A table of all schedules without required settings, and of one that is named."""
    if not options.ranks or (options.recipe and _is_recipe(options.recipe, project)):
        raise UserError("--compare takes --ranks and --microbatches, and no recipe", 2)
    named = [] if options.recipe is None else [options.recipe.removeprefix(FOLDER)]
    summaries = [
        _simulated(options, name, schedule, options.ranks, _needed(options.microbatches), _costed(options))
        for name in dict.fromkeys([*_complete(project), *named])
        for schedule in [_by_name(options, project, name, anyway=True)]
    ]
    if options.format in ("svg", "csv"):
        raise UserError(f"--format {options.format} is of one schedule; leave --compare out", 2)
    if options.format == "json":
        return json.dumps([summary.as_data() for summary in summaries], indent=1)
    return compare(summaries)


def _complete(project: Project) -> Iterator[str]:
    for name in project.registry.names():
        spec = project.registry.find(name) if name.startswith(FOLDER) else None
        if isinstance(spec, Spec) and not any(field.required for field in spec.fields.values()):
            yield name.removeprefix(FOLDER)


def _by_name(options: argparse.Namespace, project: Project, name: str, *, anyway: bool = False) -> Schedule:
    """A schedule by name, with the costs and stages per rank that it has settings for.

    Raises UserError if it has another number of stages per rank, unless `anyway`.
    """
    use = name if "." in name else FOLDER + name
    spec = project.registry.find(use)
    if isinstance(spec, Problem):
        raise RecipeError([spec])
    fields = spec.fields
    given = {"stages_per_rank": options.stages_per_rank, **options.costs}
    data = {"use": use, **{key: value for key, value in given.items() if key in fields and value is not None}}
    words = read_overrides(options.words)
    nodes = {**words, "schedule": {**data, **words.get("schedule", {})}}
    recipe = Recipe.of(nodes, "command line", project=project)
    with recipe.open("schedule") as opened:
        if "schedule" not in recipe.graph.implementers(Schedule):
            raise UserError(f"{use} is not a schedule; `drawloom list pipeline.schedules` shows all", 2)
        schedule: Schedule = opened["schedule"]
    if not anyway:
        _check_stages(options, name, schedule, options.ranks)
    return schedule


def _check_stages(options: argparse.Namespace, name: str, schedule: Schedule, ranks: int) -> None:
    if options.stages_per_rank is None:
        return
    if options.stages_per_rank != (stages := len(schedule.stage_to_rank(ranks)) // ranks):
        has = f"{name} takes {stages} on each rank"
        raise UserError(f"--stages-per-rank {options.stages_per_rank}: {has}; leave it out", 2)


def _simulated(
    options: argparse.Namespace,
    name: str,
    schedule: Schedule,
    ranks: int,
    microbatches: int,
    sharding: Sharding | None,
) -> Summary:
    stages = len(schedule.stage_to_rank(ranks)) // ranks if ranks <= MOST_RANKS else 1
    if ranks > MOST_RANKS or ranks * microbatches * stages > MOST_WORK:
        size = f"{ranks} ranks with {microbatches} microbatches on {stages} stages each"
        limits = f"{MOST_RANKS} ranks, and {MOST_WORK} microbatches times ranks times stages"
        raise UserError(f"{size} take too long to simulate; write at most {limits}", 2)
    if options.forward_only:
        return _simulated_program(options, name, forward_only(schedule.stage_to_rank(ranks), microbatches), None)
    return _simulated_program(options, name, schedule.program(ranks, microbatches), sharding)


def _simulated_program(options: argparse.Namespace, name: str, program: Program, sharding: Sharding | None) -> Summary:
    try:
        return Summary(name, simulate(program, Costs(**options.costs), options.channels, sharding))
    except Deadlock as deadlock:
        raise UserError(f"{name} can't be executed: {deadlock}") from deadlock


def only(graph: Graph, port: type) -> str:
    """The name of the node that implements a port; UserError if there is not exactly one."""
    names = graph.implementers(port)
    if len(names) != 1:
        raise UserError(f"the recipe has {len(names)} nodes that are a {port.__name__}; one is required", 2)
    return names[0]


def microbatches_of(graph: Graph) -> int:
    """Microbatches per step and replica; a mesh dimension of "auto" size counts as one replica."""
    mesh = graph.nodes[only(graph, Mesh)].settings
    replicas = math.prod(size for key in ("data_replicate", "data_shard") if isinstance(size := mesh.get(key), int))
    for node in graph.nodes.values():
        if {"global_size", "micro_size"} <= node.settings.keys():
            return max(1, int(node.settings["global_size"]) // (int(node.settings["micro_size"]) * replicas))
    return _needed(None)


def _sharding(graph: Graph) -> Sharding | None:
    """How the recipe's mesh shards parameters, or copies them; None if each rank has its own."""
    mesh = graph.nodes[only(graph, Mesh)].settings
    sizes = {key: size for key in DATA if isinstance(size := mesh.get(key), int)}
    if math.prod(sizes.values()) == 1:
        return None
    for node in graph.nodes.values():
        if {"reshard_after_forward", "sync_each_microbatch"} <= node.settings.keys():
            sharded = any(sizes.get(key, 1) > 1 for key in SHARDS)
            by_block = gathers_by_block(node.settings["reshard_after_forward"], mesh.get("pipeline", 1))
            return Sharding(sharded and not by_block, sharded and node.settings["sync_each_microbatch"])
    return None


def _costed(options: argparse.Namespace) -> Sharding | None:
    """Actions on shards that only have costs: weights are gathered once a step."""
    return Sharding("unshard" in options.costs) if {"unshard", "reduce"} & options.costs.keys() else None


def _needed(microbatches: int | None) -> int:
    if microbatches is None:
        raise UserError("how many microbatches? Write --microbatches 8", 2)
    return microbatches


COSTS = {"F": "forward", "I": "backward_input", "W": "backward_weight", "B": "backward"}
FREE = {"comm": "comm", "unshard": "unshard", "reduce": "reduce"}  # those that may cost nothing


def _costs(text: str) -> dict[str, float]:
    """Parse F=1,I=1 into costs by setting."""
    costs: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        try:
            costs[(COSTS | FREE)[key.strip()]] = number = float(value)
        except (KeyError, ValueError):
            known = ", ".join(COSTS | FREE)
            raise argparse.ArgumentTypeError(f"{part!r} is not a cost; write for example F=1 ({known})") from None
        if not (0 <= number <= MOST_COST and (number or key.strip() in FREE)):
            least = "F, B, I and W cost more than 0, all else 0 or more"
            raise argparse.ArgumentTypeError(f"{part!r}: {least}, and none more than {MOST_COST:g}")
    return costs
