"""Search for a recipe's fastest plan: over meshes, microbatches, schedules and recomputation."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from drawloom import RecipeError, UserError
from drawloom.components.distributed.device_model import DeviceModel
from drawloom.components.parallel.context import ContextDimension
from drawloom.components.parallel.expert import ExpertDimension
from drawloom.components.planning.cost_sources import PlannedCosts
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import PlanCache, TooLargeError, plan
from drawloom.components.planning.remedies import TriedPlan, Values
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.graph.project import Recipe
from drawloom.ports import Batching, MemoryPolicy, Mesh, PerDimension, Stages

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
        values: dict[str, dict[str, Any]] = {
            nodes.mesh_node: _select_mesh_settings(nodes, mesh),
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


def _select_mesh_settings(nodes: Nodes, mesh: PerDimension) -> dict[str, int]:
    """Return a mesh's settings for a plan: contexts stay, and models without experts have no `expert`."""
    kept = {ContextDimension.name, *(() if nodes.has_experts else (ExpertDimension.name,))}
    return {name: size for name, size in mesh.settings().items() if name not in kept}


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
