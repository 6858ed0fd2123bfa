"""Graphs written out as recipes: plain values, and where each value came from."""

from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import attrs

from drawloom.graph.recipe.layers import Leaf, Table, iterate_leaves
from drawloom.graph.recipe.merged import VARIABLE, MergedRecipe
from drawloom.graph.wiring.graph import Graph
from drawloom.graph.wiring.node import Node

Plain = dict[str, dict[str, Any]]
"""Nodes by name, each with `use`; an edge is "@name", or the table of a node that is written inline."""


def serialize_graph(graph: Graph) -> Plain:
    """Every node that has a table of its own, with all its settings and edges."""
    return {name: serialize_node(graph, node) for name, node in graph.nodes.items() if not node.owner}


def serialize_recipe(recipe: MergedRecipe) -> Plain:
    """The values that a recipe writes explicitly; for a resolved recipe, all values of its graph."""
    return {name: _serialize_item(table) for name, table in recipe.nodes.items()}


def _serialize_item(item: Leaf | Table) -> Any:
    return {key: _serialize_item(part) for key, part in item.items.items()} if isinstance(item, Table) else item.value


def serialize_node(graph: Graph, node: Node) -> dict[str, Any]:
    """`use`, settings and edges as a recipe writes them, without settings that are None."""
    plain: dict[str, Any] = {"use": node.spec.use}
    for name, field in node.spec.fields.items():
        if field.kind == "setting" and node.settings.get(name) is not None:
            plain[name] = serialize_value(node.settings[name])
        elif name in node.edges:
            plain[name] = _serialize_edge(graph, node, name)
    return plain


def _serialize_edge(graph: Graph, node: Node, name: str) -> Any:
    edge = node.edges[name]
    targets = [_serialize_target(graph, target) for target in edge.targets]
    match node.spec.fields[name].kind:
        case "one" | "optional":
            return targets[0]
        case "mapping":
            return dict(zip(edge.keys, targets, strict=True))
    return targets


def _serialize_target(graph: Graph, name: str) -> Any:
    target = graph.nodes[name]
    return serialize_node(graph, target) if target.owner else f"@{name}"


def serialize_value(value: Any) -> Any:
    """
    The value of a setting as a recipe writes it, in TOML types; a leading @ or $ of a string is doubled.

    None stays None, for the caller to leave out; the table of an attrs class omits fields that are None.
    """
    match value:
        case Enum():
            return serialize_value(value.value)
        case str() | PurePath():
            text = str(value)
            # A single @ or $ would read back as a reference.
            return text[0] + text if text[:1] in ("@", "$") else text
        case list() | tuple():
            return [serialize_value(item) for item in value]
        case Mapping():
            return {name: serialize_value(item) for name, item in value.items()}
        case _ if attrs.has(type(value)):
            fields = [field for field in attrs.fields(type(value)) if field.init]
            table = {field.alias: getattr(value, field.name) for field in fields}
            return {name: serialize_value(item) for name, item in table.items() if item is not None}
    return value


def flatten(plain: Mapping[str, Mapping[str, Any]]) -> Plain:
    """The same nodes, with inline nodes as nodes of their own, under the names that a graph gives them."""
    flat: Plain = {}
    for name, node in plain.items():
        flat |= _flatten_node(name, node)
    return flat


def _flatten_node(name: str, node: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, Mapping[str, Any]]] = []
    yield (
        name,
        {key: part if key == "use" else _lift_inline_nodes(part, f"{name}.{key}", found) for key, part in node.items()},
    )
    for inner, table in found:
        yield from _flatten_node(inner, table)


def _lift_inline_nodes(part: Any, name: str, found: list[tuple[str, Mapping[str, Any]]]) -> Any:
    """A value in which each inline node is replaced by "@name"."""
    if isinstance(part, Mapping) and isinstance(part.get("use"), str):
        found.append((name, part))
        return f"@{name}"
    if isinstance(part, Mapping):
        return {key: _lift_inline_nodes(inner, f"{name}.{key}", found) for key, inner in part.items()}
    if isinstance(part, list):
        return [_lift_inline_nodes(inner, f"{name}[{number}]", found) for number, inner in enumerate(part)]
    return part


def describe_provenance(graph: Graph, node: Node, key: str) -> str:
    """
    Where a setting or edge came from: a file, a variable, the command line, a default, or its type.

    Positions in shipped recipes do not depend on where those are installed. A table has a position for each layer.
    """
    item = node.table.items.get(key)
    if item is None:
        edge = node.edges.get(key)
        return f"the only {node.spec.fields[key].target}" if edge and not edge.written else "default"
    if key == "use" and node.spec.distribution:
        return f"{node.spec.distribution}; {item.label}"
    parts = [item] if isinstance(item, Leaf) else [*iterate_leaves(item)]
    first_of_layer = {id(leaf.layer): leaf for leaf in reversed(parts)}
    places = []
    for leaf in reversed(first_of_layer.values()):
        behind = find_variable(graph, leaf)
        places.append(f"{leaf.label} {leaf.value} {behind.label}" if behind else leaf.label)
    return " and ".join(places) or item.label


def find_variable(graph: Graph, leaf: Leaf) -> Leaf | None:
    """The variable that is a leaf's whole value, if one is."""
    name = leaf.value if isinstance(leaf.value, str) else ""
    return graph.recipe.vars.get(name.removeprefix(VARIABLE)) if name.startswith(VARIABLE) else None
