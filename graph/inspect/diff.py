"""Two recipes or runs side by side: what differs in what they say, and then in how they say it."""

from collections.abc import Iterator

from drawloom.graph.build.graph import Graph
from drawloom.graph.build.node import Node
from drawloom.graph.inspect.changes import changes
from drawloom.graph.inspect.provenance import variable
from drawloom.graph.inspect.serialize import serialize_graph, serialize_recipe
from drawloom.graph.recipe.layers import Leaf
from drawloom.graph.recipe.lockfile import RecipeChange
from drawloom.graph.recipe.recipe import Recipe
from drawloom.graph.toml.emit import canonical


def diff(old: Recipe, new: Graph) -> list[RecipeChange]:
    """
    Differences from a recipe to a graph; where neither is resolved, also in how they are written.

    The old recipe may be that of a run from a time when its components were others. Raises a RecipeError with the
    problems of an old recipe that is not resolved, and of the new one.
    """
    new.or_error()
    if old.is_resolved:
        return changes(serialize_recipe(old), new)
    graph = Graph.of(old, new.registry).or_error()
    cosmetic = [] if new.recipe.is_resolved else list(_cosmetic(graph, new))
    return changes(serialize_graph(graph), new) + cosmetic


def _cosmetic(old: Graph, new: Graph) -> Iterator[RecipeChange]:
    before, after = serialize_graph(old), serialize_graph(new)
    both = [name for name in before if name in after]
    for name in both:
        for key in before[name]:
            if key != "use" and key in after[name] and canonical(before[name][key]) == canonical(after[name][key]):
                was, is_now = (_how(graph, graph.nodes[name], key) for graph in (old, new))
                if was != is_now:
                    yield RecipeChange(name, key, was, is_now, "cosmetic")
    if both != [name for name in after if name in before]:
        yield RecipeChange("", "", "tables", "the same in another order", "cosmetic")


def _how(graph: Graph, node: Node, key: str) -> str:
    """How a value that is the same in both comes about."""
    item = node.table.items.get(key)
    if isinstance(item, Leaf) and variable(graph, item):
        return str(item.value)
    return "left out" if item is None else "written"
