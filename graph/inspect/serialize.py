"""Graphs as the plain values that a recipe would write for them, with every setting and edge."""

from collections.abc import Iterator, Mapping
from typing import Any

from drawloom.graph.build.graph import Graph
from drawloom.graph.build.node import Node
from drawloom.graph.recipe.layers import Leaf, Table
from drawloom.graph.recipe.recipe import Recipe
from drawloom.graph.types.structure import Values

Plain = dict[str, dict[str, Any]]
"""Nodes by name, each with `use`; edges are "@name", those to a node in place the table of that node."""


def serialize_graph(graph: Graph) -> Plain:
    """Every node that has a table of its own."""
    return {name: serialize_node(graph, node) for name, node in graph.nodes.items() if not node.owner}


def serialize_recipe(recipe: Recipe) -> Plain:
    """What a recipe says and no more: for one that is resolved, the same as its graph."""
    return {name: _merged(table) for name, table in recipe.nodes.items()}


def _merged(item: Leaf | Table) -> Any:
    return {key: _merged(part) for key, part in item.items.items()} if isinstance(item, Table) else item.value


def serialize_node(graph: Graph, node: Node) -> dict[str, Any]:
    """`use`, settings and edges as a recipe would write them; what has no value in TOML is left out."""
    plain: dict[str, Any] = {"use": node.spec.use}
    for name, field in node.spec.fields.items():
        if field.kind == "setting" and node.settings.get(name) is not None:
            plain[name] = escape(Values.unstructure(node.settings[name]))
        elif name in node.edges:
            plain[name] = _plain_edge(graph, node, name)
    return plain


def _plain_edge(graph: Graph, node: Node, name: str) -> Any:
    edge = node.edges[name]
    targets = [_plain_target(graph, target) for target in edge.targets]
    match node.spec.fields[name].kind:
        case "one" | "optional":
            return targets[0]
        case "mapping":
            return dict(zip(edge.keys, targets, strict=True))
    return targets


def _plain_target(graph: Graph, name: str) -> Any:
    target = graph.nodes[name]
    return serialize_node(graph, target) if target.owner else f"@{name}"


def escape(plain: Any) -> Any:
    """Plain values as a recipe writes them: a leading @ or $ is doubled."""
    if isinstance(plain, str) and plain[:1] in ("@", "$"):
        return plain[0] + plain
    if isinstance(plain, list):
        return [escape(part) for part in plain]
    if isinstance(plain, dict):
        return {name: escape(part) for name, part in plain.items()}
    return plain


def flatten(plain: Mapping[str, Mapping[str, Any]]) -> Plain:
    """The same nodes, those in place as nodes of their own under the names that a graph gives them."""
    flat: Plain = {}
    for name, node in plain.items():
        flat |= _flatten_node(name, node)
    return flat


def _flatten_node(name: str, node: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, Mapping[str, Any]]] = []
    yield name, {key: part if key == "use" else _lift(part, f"{name}.{key}", found) for key, part in node.items()}
    for inner, table in found:
        yield from _flatten_node(inner, table)


def _lift(part: Any, name: str, found: list[tuple[str, Mapping[str, Any]]]) -> Any:
    """A value in which "@name" stands for each node in place."""
    if isinstance(part, Mapping) and isinstance(part.get("use"), str):
        found.append((name, part))
        return f"@{name}"
    if isinstance(part, Mapping):
        return {key: _lift(inner, f"{name}.{key}", found) for key, inner in part.items()}
    if isinstance(part, list):
        return [_lift(inner, f"{name}[{number}]", found) for number, inner in enumerate(part)]
    return part
