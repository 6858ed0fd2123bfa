"""Look-ups in recipes shared by commands: a port's only node, and the pipeline."""

from inspect import getdoc

import attrs

from drawloom import Recipe, UserError
from drawloom.graph.wiring.graph import Graph
from drawloom.ports import FrozenModel, Mesh, PerDimension, Schedule, choose_micro_size


@attrs.frozen
class Pipeline:
    """A recipe's schedule, its component name, pipeline ranks, and microbatches per step (None if unknown)."""

    use: str
    schedule: Schedule
    ranks: int
    microbatches: int | None

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> "Pipeline":
        """Return a recipe's pipeline. Raises UserError unless it has exactly one schedule and one mesh."""
        graph = recipe.graph
        name = find_only_node(graph, Schedule)
        ranks = read_mesh_sizes(graph).pipeline
        with recipe.open(name) as opened:
            return cls(graph.nodes[name].spec.use, opened.get(Schedule), ranks, count_microbatches_per_replica(graph))


def find_only_node(graph: Graph, port: type, holder: str = "the recipe") -> str:
    """
    Return the name of the only node that implements a port, other than the models of teachers and references.

    Raises UserError about `holder`, the graph's owner, unless exactly one node does. Raises RecipeError if no node does
    and the graph has problems, because the missing node may have an unknown component.
    """
    frozen = {*graph.implementers(FrozenModel)}
    users = {name: {user for user, _ in graph.list_users_with_edge_names(name)} for name in graph.implementers(port)}
    names = [name for name in users if not users[name] or not users[name] <= frozen]
    if not names:
        graph.require_valid()
    if len(names) != 1:
        which = f" ({', '.join(f'[{name}]' for name in names)})" if names else ""
        required = f"exactly one is required: {str(getdoc(port)).splitlines()[0]}"
        raise UserError(f"{holder} has {len(names)} nodes that implement {port.__name__}{which}; {required}", 2)
    return names[0]


def read_mesh_sizes(graph: Graph) -> PerDimension:
    """Return the recipe's mesh sizes, with 1 for "auto"."""
    return PerDimension.from_settings(graph.nodes[find_only_node(graph, Mesh)].settings)


def count_microbatches_per_replica(graph: Graph) -> int | None:
    """Return the gradient accumulation count (microbatches per step and replica), with 1 for "auto" mesh sizes."""
    sizes = read_mesh_sizes(graph)
    replicas = sizes.data_replicate * sizes.data_shard
    for node in graph.nodes.values():
        if {"global_size", "micro_size"} <= node.settings.keys():
            size, limit = int(node.settings["global_size"]), int(node.settings["micro_size"])
            return max(1, size // (choose_micro_size([size], limit, replicas) * replicas))
    return None


def require_microbatches(microbatches: int | None) -> int:
    """Return the microbatch count. Raises UserError if it is unknown."""
    if microbatches is None:
        raise UserError("the number of microbatches is unknown; write it, such as --microbatches 8", 2)
    return microbatches
