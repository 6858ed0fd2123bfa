"""Simulation of one schedule for `drawloom schedule`, with limits on its size, and with the chosen costs."""

import argparse
from collections.abc import Sequence

import attrs

from drawloom.components.commands._recipes import read_mesh_sizes
from drawloom.components.parallel.data_shard import should_gather_per_block
from drawloom.components.pipeline.program.builders import build_forward_only_program
from drawloom.components.pipeline.program.lowering import Sharding
from drawloom.components.pipeline.program.timing import DeadlockError
from drawloom.components.pipeline.simulation.simulator import simulate
from drawloom.components.pipeline.simulation.summary import Summary, format_count
from drawloom.components.planning.cost_sources import CostSource, TracedCosts
from drawloom.components.ports.pipeline import PartitioningSchedule, Schedule
from drawloom.components.ports.program import Program
from drawloom.graph import UserError
from drawloom.graph.wiring.graph import Graph

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


def check_and_simulate_schedule(
    options: argparse.Namespace,
    name: str,
    schedule: Schedule,
    size: Size,
    source: CostSource,
    sharding: Sharding | None = None,
    *,
    offloads: bool = False,
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
    return simulate_and_summarize(
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


def simulate_and_summarize(
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
        raise UnsuitableError(str(error), error.exit_code) from error
    try:
        simulation = simulate(program, costs, options.channels, sharding)
    except DeadlockError as deadlock:
        raise UserError(f"{name} can't be executed: {deadlock}") from deadlock
    return Summary(name, simulation, None if options.forward_only else source.peak_activation_bytes(program, sizes))


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
