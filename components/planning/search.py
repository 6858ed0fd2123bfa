"""Looks for the fastest plan of a recipe on some ranks: over meshes, microbatches, schedules and recomputation."""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import attrs

from drawloom.components.distributed.device_model import DeviceModel
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import Plan, plan
from drawloom.components.planning.remedies import Values, toml_lines
from drawloom.components.ports.run import Batching
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

    A mesh is tried with little recomputation first, and with more only if it does not fit; where microbatches do not
    fit, larger ones are left out. The number of rows in a step stays as it is.
    """
    nodes = Nodes.of(recipe)
    every = [found for mesh in _meshes(nodes, device, ranks) for found in _of_mesh(recipe, nodes, device, ranks, mesh)]
    fitting = sorted((found for found in every if found.plan.fits), key=_order)
    return (fitting or sorted(every, key=lambda found: max(found.plan.peak_memory_bytes)))[:MOST]


def _order(found: Found) -> tuple[int, int]:
    """The time of a step in steps of ALIKE, then the memory."""
    return round(math.log(found.plan.time.seconds) / ALIKE), max(found.plan.peak_memory_bytes)


def _of_mesh(recipe: Recipe, nodes: Nodes, device: DeviceModel, ranks: int, mesh: dict[str, Any]) -> Iterator[Found]:
    """Plans of one mesh: for each size of microbatches and schedule the first policy that fits, or the last."""
    too_large: dict[str, int] = {}
    for rows, schedule in product(MICRO_SIZES, SCHEDULES if mesh["pipeline"] > 1 else ("",)):
        if too_large.get(schedule, rows) < rows:
            continue
        if nodes.global_size % (rows * mesh["data_replicate"] * mesh["data_shard"]):
            continue
        found = None
        for policy in POLICIES:
            sync = mesh["data_shard"] > 1 and mesh["pipeline"] == 1
            found = _planned(recipe, nodes, device, ranks, mesh, rows, schedule, policy, sync) or found
            if found is None or found.plan.fits:
                break
        if found is not None:
            if not found.plan.fits:
                too_large[schedule] = rows
            yield found


def _planned(
    recipe: Recipe,
    nodes: Nodes,
    device: DeviceModel,
    ranks: int,
    mesh: dict[str, Any],
    rows: int,
    schedule: str,
    policy: str,
    sync: bool,
) -> Found | None:
    """The plan with these settings; None if they make no sense for this recipe."""
    stages: dict[str, Any] = {"recompute": policy, "sync_each_microbatch": sync}
    if mesh.get("expert", 1) > 1:
        stages["dispatcher"] = {"use": "experts.all_to_all"}
    values: dict[str, dict[str, Any]] = {
        nodes.mesh: mesh,
        nodes.only(Batching): {"micro_size": rows},
        nodes.stages: stages,
    }
    if schedule:
        values[nodes.schedule] = {"use": f"pipeline.schedules.{schedule}"}
    try:
        return Found(values, plan(recipe.with_values(values), device, ranks))
    except (RecipeError, UserError):
        return None


def _meshes(nodes: Nodes, device: DeviceModel, ranks: int) -> Iterator[dict[str, Any]]:
    """Sizes of a mesh's dimensions: tensors within a host, pipelines and shards by powers of two, replicas the rest."""
    for tensor, pipeline in product(_divisors(ranks, min(8, device.per_host)), _divisors(ranks, 8)):
        if ranks % (tensor * pipeline):
            continue
        rest = ranks // (tensor * pipeline)
        for shard in sorted({1, min(rest, device.per_host), rest}):
            if rest % shard:
                continue
            for expert in {1, min(shard * tensor, device.per_host)} if nodes.has_experts else {1}:
                mesh = {"pipeline": pipeline, "data_replicate": rest // shard, "data_shard": shard, "tensor": tensor}
                yield mesh | ({"expert": expert} if expert > 1 else {})


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
        peak, part = max(planned.peak_memory_bytes) / 1e9, planned.time
        spent = ", ".join(
            f"{name} {seconds / part.seconds:.0%}"
            for name, seconds in part.as_data().items()
            if name != "compute" and seconds > 0.01 * part.seconds
        )
        speed = f"{part.seconds:.3g} s, {planned.tokens_per_second:,.0f} tokens/s, {peak:.1f} GB"
        lines += [f"{number:2}  {speed}{': ' + spent if spent else ''}", f"    {'; '.join(toml_lines(each.values))}"]
    return "\n".join(lines).lstrip("\n")
