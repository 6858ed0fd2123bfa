"""Where a setting or edge of a node has come from: a file, a variable, the command line, a default, or its type."""

from collections.abc import Iterator

from drawloom.graph.build.graph import Graph
from drawloom.graph.build.node import Node
from drawloom.graph.inspect.listing import ports
from drawloom.graph.recipe.layers import Layer, Leaf, Path, Table
from drawloom.graph.recipe.variables import VARIABLE


def provenance(graph: Graph, node: Node, key: str) -> str:
    """In a few words, with places that do not depend on where recipes are installed; of a table, one for each file."""
    item = node.table.items.get(key)
    if key == "use" and node.spec.distribution:
        return f"{node.spec.distribution}; {_place(*_where(node.table.items[key]))}"
    if item is not None:
        by_layer = {id(leaf.layer): leaf for leaf in reversed([*leaves(item)])}
        return " and ".join(_written(graph, leaf) for leaf in reversed(by_layer.values())) or _place(*_where(item))
    edge = node.edges.get(key)
    return f"the only {ports(node.spec.fields[key])}" if edge and not edge.written else "default"


def leaves(item: Leaf | Table) -> Iterator[Leaf]:
    """A leaf, or all that are inside a table."""
    stack: list[Leaf | Table] = [item]
    while stack:
        part = stack.pop()
        if isinstance(part, Leaf):
            yield part
        else:
            stack += reversed(part.items.values())


def variable(graph: Graph, leaf: Leaf) -> Leaf | None:
    """The variable that stands for a leaf's whole value, if one does."""
    name = leaf.value if isinstance(leaf.value, str) else ""
    return graph.recipe.vars.get(name.removeprefix(VARIABLE)) if name.startswith(VARIABLE) else None


def _written(graph: Graph, leaf: Leaf) -> str:
    place = _place(*_where(leaf))
    behind = variable(graph, leaf)
    return f"{place} {leaf.value} {_place(*_where(behind))}" if behind else place


def _where(item: Leaf | Table) -> tuple[Layer, Path, bool]:
    return item.layer, item.path, isinstance(item, Leaf)


def _place(layer: Layer, path: Path, is_leaf: bool) -> str:
    place = layer.key(path) if is_leaf else layer.value(path)
    return str(place).replace(layer.source, layer.label, 1)
