"""
Search for a recipe's fastest plan: over meshes, microbatches, schedules and recomputation.

For a recipe larger than its devices' memory, the search finds remedies: changed settings, verified by plans.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import attrs

from drawloom import Recipe, RecipeError, UserError
from drawloom.components.distributed.device_model import DeviceModel
from drawloom.components.parallel.context import ContextDimension
from drawloom.components.parallel.expert import ExpertDimension
from drawloom.components.planning.cost_sources import PlannedCosts
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import Plan, PlanCache, TooLargeError, plan
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.graph.cli.command import output, output_class
from drawloom.graph.inspect.serialize import serialize_nodes
from drawloom.graph.toml.emit import dump_toml
from drawloom.ports import Batching, MemoryPolicy, Mesh, PerDimension, Precision, Stages

Values = Mapping[str, Mapping[str, Any]]
"""Settings by node."""


@output_class
class RemedyData:
    """Other settings, and their plan."""

    toml: Sequence[str] = output("settings as lines of TOML")
    cost: str = output("disadvantage of the settings")
    peak_memory_bytes: int = output("largest peak of a rank")
    step_seconds: float = output("seconds of a step")
    ranks: int = output("number of processes")
    fits: bool = output("whether every rank fits")


@attrs.frozen
class TriedPlan:
    """Changed settings, the plan with these settings, and their cost in words, if known."""

    values: Values
    plan: Plan
    cost: str = ""

    @property
    def keys(self) -> set[tuple[str, str]]:
        """Return the settings' nodes and names."""
        return {(node, key) for node, settings in self.values.items() for key in settings}

    @property
    def data(self) -> RemedyData:
        """Return the settings and their plan, for JSON."""
        planned = self.plan
        return RemedyData(
            toml=self.toml_lines,
            cost=self.cost,
            peak_memory_bytes=planned.peak_bytes,
            step_seconds=planned.time.seconds,
            ranks=planned.ranks,
            fits=planned.fits,
        )

    @property
    def toml_lines(self) -> list[str]:
        """Return the settings as TOML lines with dotted keys, for an overlay."""
        return [
            f"{node}.{key} = {dump_toml(value)}"
            for node, settings in self.values.items()
            for key, value in settings.items()
        ]


def find_remedies(recipe: Recipe, planned: Plan) -> list[TriedPlan]:
    """
    Return remedies for a plan over its memory limit, sorted by decreasing memory; all take less than the plan.

    If no remedy fits by itself, the last remedy combines as many candidates as needed, cheap ones first.
    """
    helpful = [
        remedy
        for values, cost, ranks in list_settings_against_memory(Nodes.from_recipe(recipe), planned)
        if _saves_memory(remedy := try_settings(recipe, values, cost, planned.device, ranks), planned)
    ]
    helpful.sort(key=lambda remedy: -remedy.plan.peak_bytes)
    if not any(remedy.plan.fits for remedy in helpful):
        helpful += _combine_until_fit(recipe, planned)
    return helpful


def describe_excess(recipe: Recipe, planned: Plan) -> str:
    """Return the error message for a run too large for its devices, with fitting settings, the nearest first."""
    fitting = [
        remedy for remedy in find_remedies(recipe, planned) if remedy.plan.fits and remedy.plan.ranks == planned.ranks
    ]
    settings = " or ".join(
        f"{'; '.join(remedy.toml_lines)} ({format_decimal_byte_size(remedy.plan.peak_bytes)}, "
        f"{remedy.plan.time.seconds:.3g} s a step)"
        for remedy in fitting
    )
    fullest = max(planned.memory, key=lambda rank: rank.peak_bytes)
    needed, available = map(format_decimal_byte_size, (fullest.peak_bytes, planned.device.memory))
    excess = f"the run needs {needed} on a GPU, in {fullest.action_at_peak}, and each has {available}"
    host = max(rank.host for rank in planned.memory)
    if host and planned.device.host_memory:
        capacity = format_decimal_byte_size(planned.device.host_memory)
        excess += f", and {format_decimal_byte_size(host)} in host memory of {capacity}"
    return f"{excess}; settings that fit: {settings or 'none was found'}"


def _combine_until_fit(recipe: Recipe, planned: Plan) -> Iterator[TriedPlan]:
    """Yield the shortest combination of leading candidates with which the recipe fits, if any."""
    so_far: dict[str, dict[str, Any]] = {}
    best = planned
    for values, _, ranks in list_settings_against_memory(Nodes.from_recipe(recipe), planned):
        merged = {node: {**so_far.get(node, {}), **values.get(node, {})} for node in {**so_far, **values}}
        remedy = try_settings(recipe, merged, "together", best.device, ranks)
        if _saves_memory(remedy, best):
            so_far, best = merged, remedy.plan
            if best.fits:
                yield remedy
                return


def try_settings(
    recipe: Recipe, values: Values, cost_in_words: str, device: DeviceModel, ranks: int
) -> TriedPlan | None:
    """Plan the recipe with these settings; return None if they are invalid in this recipe, or its own."""
    try:
        changed = recipe.with_values(values)
        if serialize_nodes(changed.graph.nodes) == serialize_nodes(recipe.graph.nodes):
            return None
        return TriedPlan(values, plan(changed, device, ranks), cost_in_words)
    except (RecipeError, UserError):
        return None


def _saves_memory(remedy: TriedPlan | None, unfitting_plan: Plan) -> TypeGuard[TriedPlan]:
    """Return whether a plan with other settings exists and takes less memory."""
    return remedy is not None and remedy.plan.peak_bytes < 0.99 * unfitting_plan.peak_bytes


def list_settings_against_memory(nodes: Nodes, planned: Plan) -> Iterator[tuple[Values, str, int]]:
    """
    Yield settings, their cost in words, and the rank count; cheap settings first.

    Some are invalid in this recipe, or change nothing.
    """
    ranks, sizes, mesh, stages = planned.ranks, planned.mesh.sizes, nodes.mesh_node, nodes.stages_node
    batch, rows = nodes.find_only_node(Batching), nodes.settings(Batching)["micro_size"]
    more = {"data_shard": sizes.data_shard * sizes.data_replicate, "data_replicate": 1}
    yield {stages: {"sync_each_microbatch": True}}, "gradients are reduced for each microbatch", ranks
    yield {stages: {"recompute": "selective"}}, "norms and gates are computed twice", ranks
    yield {nodes.find_only_node(Precision): {"compute": "bfloat16"}}, "layers compute with 8 bits of fraction", ranks
    yield {batch: {"micro_size": max(1, rows // 2)}}, "products of fewer rows are slower", ranks
    yield {mesh: more}, "parameters are gathered from other ranks", ranks
    for name in nodes.streaming_optimizer_nodes:
        yield {name: {"states": "host"}}, "optimizer state is streamed from host memory in each step", ranks
        yield {name: {"state_dtype": "uint8"}}, "means of the optimizer have 8 bits", ranks
    yield {"streamed": {"use": "frozen_weights.streamed"}}, "frozen weights are copied from host memory", ranks
    yield {"offload": {"use": "pipeline.offloaded"}}, "activations wait in host memory", ranks
    yield {stages: {"recompute": "blocks"}}, "each layer's forward pass runs twice", ranks
    yield {"offload": {"use": "pipeline.offloaded_inputs"}}, "inputs of layers wait in host memory", ranks
    yield {stages: {"recompute": "quantized"}}, "inputs of norms and gates in 8 bits round gradients", ranks
    yield {stages: {"reshard_after_forward": True}}, "layers are gathered for each microbatch", ranks
    yield {mesh: {"data_shard": 2 * sizes.data_shard}}, f"{2 * ranks} ranks", 2 * ranks


def format_remedies(remedies: Sequence[TriedPlan]) -> str:
    """Return a line per remedy: settings, memory, time and cost."""
    if not remedies:
        return "nothing that was tried takes less memory; take more ranks, or a smaller model"
    lines = ["what would help, each by itself:"]
    for remedy in remedies:
        fits = f"{format_decimal_byte_size(remedy.plan.peak_bytes)}, {'fits' if remedy.plan.fits else 'too much'}"
        settings, seconds = "; ".join(remedy.toml_lines), remedy.plan.time.seconds
        lines.append(f"  {settings}  # {fits}; {seconds:.3g} s a step; {remedy.cost}")
    return "\n".join(lines)


MAX_PLANS_SHOWN = 10

SCHEDULES = ("one_f_one_b", "zero_bubble_v")
"""Schedules that are tried: the one with the fewest messages, and the one with the smallest bubble at equal memory."""

POLICIES = ("none", "selective", "blocks")

MICRO_SIZES = (1, 2, 4)

TIME_TOLERANCE = 0.01
"""Relative difference below which times count as equal, because plans are not more accurate; less memory wins then."""


LISTS = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]")
"""Pattern of lists, and of lists of lists, in TOML."""

MAX_LIST_LENGTH = 60
"""Characters of a list above which a table abbreviates it; overlays and JSON contain the whole list."""

MAX_SLOWDOWN = 1.25
"""Time of a plan that does not fit, relative to the fastest, above which more recomputation is not tried."""


END_COSTS = ("embedding_layer_cost", "head_layer_cost")
"""Settings of stages that a partitioning schedule ignores."""


def search_fastest_plans(recipe: Recipe, device: DeviceModel, ranks: int) -> list[TriedPlan]:
    """
    Return the fitting plans, the fastest first; if none fits, the plans with the least memory.

    Every mesh is tried with little recomputation first, with more recomputation only if it does not fit, and with
    larger microbatches while they fit and are faster. Tensor parallelism grows while it makes the step faster. The
    fastest pipeline is also tried with `pipeline.schedules.auto`. The global batch size does not change. Raises
    UserError with the first reason if no mesh suits the recipe.
    """
    searched = _Search(Nodes.from_recipe(recipe), device, ranks)
    tried = list(searched.plan_meshes())
    tried += searched.search_auto_schedules(tried)
    if not tried and searched.problem:
        raise UserError(f"no mesh of {ranks} ranks suits the recipe: {searched.problem}")
    plans = sorted(tried, key=lambda choice: choice.plan.peak_bytes)
    fitting = [choice for choice in plans if choice.plan.fits]
    fitting.sort(key=lambda choice: round(math.log(choice.plan.time.seconds) / TIME_TOLERANCE))
    return (fitting or plans)[:MAX_PLANS_SHOWN]


@attrs.define(eq=False)
class _Search:
    """Search over a recipe's plans, with a shared cache."""

    nodes: Nodes
    device: DeviceModel
    ranks: int
    cache: PlanCache = attrs.field(factory=PlanCache)
    too_large: list[tuple[int, PerDimension]] = attrs.field(factory=list)
    best: float = math.inf
    problem: str = ""

    def plan_meshes(self) -> Iterator[TriedPlan]:
        """
        Yield plans by rising tensor sizes until a larger one is no faster.

        If no plan fits, also yield plans with the least memory.
        """
        before = math.inf
        for tensor in _list_power_of_two_divisors(self.ranks, min(8, self.device.per_host)):
            for mesh in _list_meshes(self.nodes, self.device, self.ranks, tensor):
                yield from self._plan_mesh(mesh)
            if self.best == before < math.inf:
                return
            before = self.best
        if self.best == math.inf:
            for _, mesh in sorted(self.too_large, key=lambda pair: pair[0])[:MAX_PLANS_SHOWN]:
                choice = self._plan_configuration_if_valid(mesh, 1, SCHEDULES[0], POLICIES[-1], None)
                yield from () if choice is None else (choice,)

    def search_auto_schedules(self, tried: Sequence[TriedPlan]) -> list[TriedPlan]:
        """Search for a schedule and stages, and return the fastest fitting pipeline."""
        nodes, device = self.nodes, self.device
        pipelines = [choice for choice in tried if choice.plan.fits and choice.plan.mesh.sizes.pipeline > 1]
        fastest = min(pipelines, key=lambda choice: choice.plan.time.seconds, default=None)
        if fastest is None:
            return []
        # Slices include the costs of the ends, and the schedule sets the recompute policies.
        ends = [key for key in END_COSTS if nodes.settings(Stages).get(key)]
        stages = {**fastest.values[nodes.stages_node], **dict.fromkeys(ends, 0), "recompute": "none"}
        values = {**fastest.values, nodes.stages_node: stages}
        cache = attrs.evolve(self.cache, views={})  # without the costs of the ends, stages contain other layers
        try:
            planned = PlannedCosts(nodes.recipe.with_values(values), device, cache)
            costs = planned.auto_schedule_settings(fastest.plan.mesh.sizes.pipeline)
            schedule = {"use": "pipeline.schedules.auto", "microbatches": fastest.plan.microbatches, **costs}
            choice = self._plan_if_valid({**values, nodes.schedule_node: schedule}, cache)
        except (RecipeError, UserError):  # also TooLargeError: stages of other sizes may contain more parameters
            return []
        return [] if choice is None else [choice]

    def _plan_mesh(self, mesh: PerDimension) -> Iterator[TriedPlan]:
        """Yield plans on one mesh: for every schedule and microbatch size the first fitting policy, or the last."""
        for schedule in SCHEDULES[: None if mesh.pipeline > 1 else 1]:
            best = math.inf
            for rows in MICRO_SIZES:
                if self.nodes.global_batch_size % (rows * mesh.data_replicate * mesh.data_shard):
                    break
                try:
                    choice = self._plan_with_rising_recomputation(mesh, rows, schedule)
                except TooLargeError as error:
                    self.too_large.append((error.bytes, mesh))
                    return
                if choice is None:
                    break
                yield choice
                if not choice.plan.fits or choice.plan.time.seconds > best:
                    break
                best = choice.plan.time.seconds

    def _plan_with_rising_recomputation(self, mesh: PerDimension, rows: int, schedule: str) -> TriedPlan | None:
        """Return the plan with the least recomputation that fits; if none fits, a plan with more; None if invalid."""
        choice = None
        for policy in POLICIES if not self.nodes.find_nodes(MemoryPolicy) else POLICIES[:1]:
            choice = self._plan_configuration_if_valid(mesh, rows, schedule, policy, self.cache) or choice
            if choice is None:
                break
            if choice.plan.fits:
                self.best = min(self.best, choice.plan.time.seconds)
                break
            if choice.plan.time.seconds > MAX_SLOWDOWN * self.best:
                break  # more recomputation takes even longer
        return choice

    def _plan_configuration_if_valid(
        self, mesh: PerDimension, rows: int, schedule: str, policy: str, cache: PlanCache | None
    ) -> TriedPlan | None:
        """Plan with these settings; return None if they are invalid. Raises TooLargeError if parameters do not fit."""
        nodes, sync = self.nodes, mesh.data_shard > 1 and mesh.pipeline == 1
        stages: dict[str, Any] = {"recompute": policy, "sync_each_microbatch": sync}
        if nodes.has_experts:
            stages["dispatcher"] = {"use": "experts.all_to_all" if mesh.expert > 1 else "experts.local"}
        batch = {"micro_size": rows}
        # contexts stay, and models without experts have no `expert`
        kept = {ContextDimension.name, *(() if nodes.has_experts else (ExpertDimension.name,))}
        values: dict[str, dict[str, Any]] = {
            nodes.mesh_node: {name: size for name, size in mesh.settings().items() if name not in kept},
            nodes.find_only_node(Batching): batch,
            nodes.stages_node: stages,
        }
        if mesh.pipeline > 1:
            values[nodes.schedule_node] = {"use": f"pipeline.schedules.{schedule}"}
        return self._plan_if_valid(values, cache)

    def _plan_if_valid(self, values: Values, cache: PlanCache | None) -> TriedPlan | None:
        """Plan with these settings; return None if they are invalid, and keep the first reason."""
        try:
            return TriedPlan(values, plan(self.nodes.recipe.with_values(values), self.device, self.ranks, cache))
        except TooLargeError:
            raise
        except (RecipeError, UserError) as error:
            self.problem = self.problem or str(error)
            return None


def _list_meshes(nodes: Nodes, device: DeviceModel, ranks: int, tensor: int) -> Iterator[PerDimension]:
    """Yield meshes with this `tensor` size: pipelines and shards in powers of two; the context size does not change."""
    context = PerDimension.from_settings(nodes.settings(Mesh)).context
    for pipeline in _list_power_of_two_divisors(ranks, 8):
        rest, remainder = divmod(ranks, tensor * pipeline * context)
        if remainder:
            continue
        for shard in sorted({1, min(rest, device.per_host), rest}):
            if rest % shard:
                continue
            for expert in {1, min(shard * tensor, device.per_host)} if nodes.has_experts else {1}:
                yield PerDimension(
                    pipeline=pipeline,
                    data_replicate=rest // shard,
                    data_shard=shard,
                    context=context,
                    tensor=tensor,
                    expert=expert,
                )


def _list_power_of_two_divisors(number: int, most: int) -> list[int]:
    """Return a number's divisors among the powers of two, up to `most`."""
    return [size for size in (2**power for power in range(12)) if size <= most and number % size == 0]


def format_search_table(choices: Sequence[TriedPlan]) -> str:
    """Return plans as a table: time, tokens/s, memory, and the settings."""
    if not choices:
        return "no mesh of that many ranks suits the recipe; take another number of ranks, or another global_size"
    lines = ["" if choices[0].plan.fits else "no plan fits; the plans with the least memory:"]
    for number, choice in enumerate(choices, 1):
        planned = choice.plan
        time, memory = planned.time, format_decimal_byte_size(planned.peak_bytes)
        spent = ", ".join(
            f"{name} {seconds / time.seconds:.0%}"
            for name, seconds in attrs.asdict(time).items()
            if name != "compute" and seconds > 0.01 * time.seconds
        )
        speed = f"{time.seconds:.3g} s, {planned.tokens_per_second:,.0f} tokens/s, {memory}"
        settings = "; ".join(_abbreviate_lists(line) for line in choice.toml_lines)
        lines += [f"{number:2}  {speed}{': ' + spent if spent else ''}", f"    {settings}"]
    return "\n".join(lines).lstrip("\n")


def _abbreviate_lists(line: str) -> str:
    """Replace long lists in a line by [...]."""
    return LISTS.sub(lambda match: match[0] if len(match[0]) < MAX_LIST_LENGTH else "[...]", line)
