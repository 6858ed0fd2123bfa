"""Look-ups in recipes that several commands share: the only node of a port, and the pipeline."""

import attrs

from drawloom.components.ports.distributed import Mesh, PerDimension
from drawloom.components.ports.pipeline import Schedule
from drawloom.graph import UserError
from drawloom.graph.project import Recipe
from drawloom.graph.wiring.graph import Graph


@attrs.frozen
class Pipeline:
    """Schedule of a recipe, its component's name, pipeline ranks, and microbatches per step, None if not known."""

    use: str
    schedule: Schedule
    ranks: int
    microbatches: int | None

    @classmethod
    def of(cls, recipe: Recipe) -> "Pipeline":
        """Return the pipeline of a recipe. Raises UserError unless it has exactly one schedule and one mesh."""
        graph = recipe.graph
        name = only(graph, Schedule)
        ranks = mesh_sizes(graph).pipeline
        with recipe.open(name) as opened:
            return cls(graph.nodes[name].spec.use, opened.get(Schedule), ranks, microbatches_of(graph))


def only(graph: Graph, port: type, holder: str = "the recipe") -> str:
    """
    Return the name of the only node that implements a port.

    Raises UserError, which names the `holder` of the graph, unless there is exactly one. Raises RecipeError if there is
    none and the graph has problems, because the node may be one with an unknown component.
    """
    names = graph.implementers(port)
    if not names:
        graph.require_valid()
    if len(names) != 1:
        which = f" ({', '.join(f'[{name}]' for name in names)})" if names else ""
        raise UserError(f"{holder} has {len(names)} nodes that are a {port.__name__}{which}; one is required", 2)
    return names[0]


def mesh_sizes(graph: Graph) -> PerDimension:
    """Return the sizes of the recipe's mesh; "auto" is 1."""
    return PerDimension.of_settings(graph.nodes[only(graph, Mesh)].settings)


def microbatches_of(graph: Graph) -> int | None:
    """Return the microbatches per step and replica; a mesh dimension of "auto" size counts as one replica."""
    sizes = mesh_sizes(graph)
    replicas = sizes.data_replicate * sizes.data_shard
    for node in graph.nodes.values():
        if {"global_size", "micro_size"} <= node.settings.keys():
            return max(1, int(node.settings["global_size"]) // (int(node.settings["micro_size"]) * replicas))
    return None


def needed(microbatches: int | None) -> int:
    """Return the microbatches of a step. Raises UserError if they are not known."""
    if microbatches is None:
        raise UserError("how many microbatches? Write --microbatches 8", 2)
    return microbatches
