"""Remedies for a recipe larger than its devices' memory: changed settings, verified by plans."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import attrs

from drawloom import RecipeError, UserError
from drawloom.components.distributed.device_model import DeviceModel
from drawloom.components.planning.nodes import Nodes
from drawloom.components.planning.plan import Plan, plan
from drawloom.components.storage.byte_size import format_decimal_byte_size
from drawloom.graph.cli.result import output, output_class
from drawloom.graph.inspect.serialize import serialize_nodes
from drawloom.graph.project import Recipe
from drawloom.graph.toml.emit import dump_toml
from drawloom.ports import Batching, Precision

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
