"""Looks for the fastest plan of a recipe on some ranks: over meshes, microbatches, schedules and recomputation."""

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from drawloom.components.distributed.device_model import DeviceModel
from drawloom.components.parallel.context import ContextDimension
from drawloom.components.parallel.expert import ExpertDimension
from drawloom.components.planning.cost_sources import Planned
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import Plan, PlanCache, TooLarge, plan
from drawloom.components.planning.remedies import Values, toml_lines
from drawloom.components.ports.distributed import PerDimension
from drawloom.components.ports.run import Batching
from drawloom.components.storage.byte_size import byte_size
from drawloom.graph import RecipeError, UserError
from drawloom.graph.project import Recipe

MOST = 10
"""Plans that are shown."""

SCHEDULES = ("one_f_one_b", "zero_bubble_v")
"""Schedules that are tried: the one of least messages, and the one of least bubble in as much memory."""

POLICIES = ("none", "selective", "blocks")

MICRO_SIZES = (1, 2, 4)

ALIKE = 0.01
"""Plans whose times differ by less are taken for alike, for none is so exact; that of less memory comes first then."""


LISTS = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]")
"""Lists, and lists of lists."""

LONG = 60
"""Characters of a list that a table has no room for; overlays and JSON have it."""

HOPELESS = 1.25
"""How much slower than the fastest a plan may be that does not fit, for more recomputation to be tried."""


ENDS = ("embedding_layer_cost", "head_layer_cost")
"""Settings of stages that a schedule that cuts them does without."""


@attrs.frozen
class Found:
    """Settings, and the plan with them."""

    values: Values
    plan: Plan

    @property
    def overlay(self) -> str:
        """The settings as an overlay in TOML."""
        return "\n".join(toml_lines(self.values))


def search(recipe: Recipe, device: DeviceModel, ranks: int) -> list[Found]:
    """
    The fastest plans that fit, the first is the fastest; of none, those that take least memory.

    A mesh is tried with little recomputation first, and with more only if it does not fit, and with larger microbatches
    while they fit and are faster; tensors are divided further while that is faster. The fastest pipeline is tried with
    `pipeline.schedules.auto`, too. The number of rows in a step stays as it is. If no mesh suits the recipe, UserError
    has the first reason.
    """
    searched = _Search(Nodes.of(recipe), device, ranks)
    every = list(searched.found())
    every += searched.with_auto(every)
    if not every and searched.problem:
        raise UserError(f"no mesh of {ranks} ranks suits the recipe: {searched.problem}")
    fitting = sorted((found for found in every if found.plan.fits), key=_order)
    return (fitting or sorted(every, key=lambda found: max(found.plan.peak_memory_bytes)))[:MOST]


def _order(found: Found) -> tuple[int, int]:
    """The time of a step in steps of ALIKE, then the memory."""
    return round(math.log(found.plan.time.seconds) / ALIKE), max(found.plan.peak_memory_bytes)


@attrs.define(eq=False)
class _Search:
    """Plans of a recipe on some ranks, which share a cache."""

    nodes: Nodes
    device: DeviceModel
    ranks: int
    cache: PlanCache = attrs.field(factory=PlanCache)
    too_large: list[tuple[int, PerDimension]] = attrs.field(factory=list)
    best: float = math.inf
    problem: str = ""

    def found(self) -> Iterator[Found]:
        """All plans that are worth a look; if nothing fits, those of the meshes that take least."""
        before = math.inf
        for tensor in _divisors(self.ranks, min(8, self.device.per_host)):
            for mesh in _meshes(self.nodes, self.device, self.ranks, tensor):
                yield from self._of(mesh)
            if self.best == before < math.inf:
                return
            before = self.best
        if self.best == math.inf:
            for _, mesh in sorted(self.too_large, key=lambda each: each[0])[:MOST]:
                if (found := self._planned(mesh, 1, _schedules(mesh)[0], POLICIES[-1], None)) is not None:
                    yield found

    def with_auto(self, every: Sequence[Found]) -> list[Found]:
        """The fastest pipeline that fits with a schedule and stages that are found for it."""
        nodes, device = self.nodes, self.device
        pipelines = [found for found in every if found.plan.fits and found.plan.mesh.sizes.pipeline > 1]
        fastest = min(pipelines, key=lambda each: each.plan.time.seconds, default=None)
        if fastest is None:
            return []
        # Slices have the costs of the ends, and the schedule says what is recomputed.
        ends = [key for key in ENDS if nodes.settings(nodes.stages).get(key)]
        stages = {**fastest.values[nodes.stages], **dict.fromkeys(ends, 0), "recompute": "none"}
        values = {**fastest.values, nodes.stages: stages}
        cache = attrs.evolve(self.cache, views={})  # without the costs of the ends, stages have other layers
        try:
            planned = Planned(nodes.recipe.with_values(values), device, cache)
            costs = planned.slices(fastest.plan.mesh.sizes.pipeline)
            schedule = {"use": "pipeline.schedules.auto", "microbatches": fastest.plan.microbatches, **costs}
            found = self._with({**values, nodes.schedule: schedule}, cache)
        except (RecipeError, UserError):  # TooLarge, too: stages of other sizes may hold more parameters
            return []
        return [] if found is None else [found]

    def _of(self, mesh: PerDimension) -> Iterator[Found]:
        """Plans of one mesh: for each schedule and size of microbatches the first policy that fits, or the last."""
        for schedule in _schedules(mesh):
            best = math.inf
            for rows in MICRO_SIZES:
                if self.nodes.global_size % (rows * mesh.data_replicate * mesh.data_shard):
                    break
                try:
                    found = self._of_size(mesh, rows, schedule)
                except TooLarge as error:
                    self.too_large.append((error.bytes, mesh))
                    return
                if found is None:
                    break
                yield found
                if not found.plan.fits or found.plan.time.seconds > best:
                    break
                best = found.plan.time.seconds

    def _of_size(self, mesh: PerDimension, rows: int, schedule: str) -> Found | None:
        found = None
        for policy in POLICIES:
            found = self._planned(mesh, rows, schedule, policy, self.cache) or found
            if found is None:
                break
            if found.plan.fits:
                self.best = min(self.best, found.plan.time.seconds)
                break
            if found.plan.time.seconds > HOPELESS * self.best:
                break  # recomputation takes yet longer
        return found

    def _planned(
        self, mesh: PerDimension, rows: int, schedule: str, policy: str, cache: PlanCache | None
    ) -> Found | None:
        """The plan with these settings; None if they make no sense for this recipe. Raises TooLarge if it can't fit."""
        nodes, sync = self.nodes, mesh.data_shard > 1 and mesh.pipeline == 1
        stages: dict[str, Any] = {"recompute": policy, "sync_each_microbatch": sync}
        if nodes.has_experts:
            stages["dispatcher"] = {"use": "experts.all_to_all" if mesh.expert > 1 else "experts.local"}
        batch = {"micro_size": rows}
        values: dict[str, dict[str, Any]] = {
            nodes.mesh: _settings(nodes, mesh),
            nodes.only(Batching): batch,
            nodes.stages: stages,
        }
        if schedule:
            values[nodes.schedule] = {"use": f"pipeline.schedules.{schedule}"}
        return self._with(values, cache)

    def _with(self, values: Values, cache: PlanCache | None) -> Found | None:
        try:
            return Found(values, plan(self.nodes.recipe.with_values(values), self.device, self.ranks, cache))
        except TooLarge:
            raise
        except (RecipeError, UserError) as error:
            self.problem = self.problem or str(error)
            return None


def _schedules(mesh: PerDimension) -> tuple[str, ...]:
    return SCHEDULES if mesh.pipeline > 1 else ("",)


def _meshes(nodes: Nodes, device: DeviceModel, ranks: int, tensor: int) -> Iterator[PerDimension]:
    """Sizes of a mesh's other dimensions: pipelines and shards by powers of two, replicas the rest; contexts stay."""
    context = PerDimension.of_settings(nodes.mesh_settings).context
    for pipeline in _divisors(ranks, 8):
        rest, over = divmod(ranks, tensor * pipeline * context)
        if over:
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


def _settings(nodes: Nodes, mesh: PerDimension) -> dict[str, int]:
    """Return the settings of a mesh that a plan tries: contexts stay, and models without experts have no `expert`."""
    kept = {ContextDimension.name, *(() if nodes.has_experts else (ExpertDimension.name,))}
    return {name: size for name, size in mesh.settings().items() if name not in kept}


def _divisors(number: int, most: int) -> list[int]:
    """Powers of two that divide a number, and are at most another."""
    return [size for size in (2**power for power in range(12)) if size <= most and number % size == 0]


def search_text(found: Sequence[Found]) -> str:
    """A table of plans, the best first: time, tokens/s, memory, and the settings."""
    if not found:
        return "no mesh of that many ranks suits the recipe; take another number of ranks, or another global_size"
    lines = ["" if found[0].plan.fits else "none fits; those that take least memory:"]
    for number, each in enumerate(found, 1):
        planned = each.plan
        peak, part = max(planned.peak_memory_bytes), planned.time
        spent = ", ".join(
            f"{name} {seconds / part.seconds:.0%}"
            for name, seconds in part.as_data().items()
            if name != "compute" and seconds > 0.01 * part.seconds
        )
        speed = f"{part.seconds:.3g} s, {planned.tokens_per_second:,.0f} tokens/s, {byte_size(peak)}"
        settings = "; ".join(_shortened(line) for line in toml_lines(each.values))
        lines += [f"{number:2}  {speed}{': ' + spent if spent else ''}", f"    {settings}"]
    return "\n".join(lines).lstrip("\n")


def _shortened(line: str) -> str:
    return LISTS.sub(lambda found: found[0] if len(found[0]) < LONG else "[...]", line)
