"""Graphs as recipes: plain values, and the origin of every value."""

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import reduce
from pathlib import PurePath
from typing import Any

import attrs

from drawloom.graph.recipe.layers import Leaf, Table, iterate_leaves
from drawloom.graph.recipe.merged import VARIABLE, MergedRecipe
from drawloom.graph.wiring.graph import Graph
from drawloom.graph.wiring.node import Node

Plain = dict[str, dict[str, Any]]
"""Nodes by name, each with `use`. An edge is "@name", or the table of an inline node."""


def serialize_nodes(nodes: Mapping[str, Node], *, recorded: bool = False) -> Plain:
    """
    Serialize every node of a graph with a table of its own, with all settings and edges.

    If `recorded`, relative paths are written as in the lock file.
    """
    return {name: serialize_node(nodes, node, recorded=recorded) for name, node in nodes.items() if not node.owner}


def nest_groups(plain: Plain) -> dict[str, Any]:
    """Return nodes as a recipe's tables: the node "group.name" is the table "name" in the table "group"."""
    nested: dict[str, Any] = {}
    for name, table in plain.items():
        *groups, last = name.split(".")
        reduce(lambda tables, group: tables.setdefault(group, {}), groups, nested)[last] = table
    return nested


def serialize_recipe(recipe: MergedRecipe) -> Plain:
    """Serialize a recipe's explicit values. For a resolved recipe these are all values of its graph."""
    return {name: _serialize_item(table) for name, table in recipe.nodes.items()}


def _serialize_item(item: Leaf | Table) -> Any:
    return {key: _serialize_item(part) for key, part in item.items.items()} if isinstance(item, Table) else item.value


def serialize_node(nodes: Mapping[str, Node], node: Node, *, recorded: bool = False) -> dict[str, Any]:
    """Serialize `use`, settings and edges as a recipe writes them, without None."""
    plain: dict[str, Any] = {"use": node.spec.use}
    settings = node.settings_as_written if recorded else node.settings
    for name, field in node.spec.fields.items():
        if field.kind == "setting" and settings.get(name) is not None:
            plain[name] = convert_to_toml_types(settings[name])
        elif name in node.edges:
            plain[name] = _serialize_edge(nodes, node, name, recorded)
    return plain


def _serialize_edge(nodes: Mapping[str, Node], node: Node, name: str, recorded: bool) -> Any:
    edge = node.edges[name]
    # Only the place where an inline node is written has its table; other references name it.
    own = f"{node.name}.{name}"
    targets = [
        serialize_node(nodes, nodes[target], recorded=recorded)
        if nodes[target].owner
        and target.startswith(own)
        and target[len(own) : len(own) + 1] in ("", ".", "[")
        and target not in edge.targets[:number]
        else f"@{target}"
        for number, target in enumerate(edge.targets)
    ]
    match node.spec.fields[name].kind:
        case "one" | "optional":
            return targets[0]
        case "mapping":
            return dict(zip(edge.keys, targets, strict=True))
    return targets


def convert_to_toml_types(value: Any) -> Any:
    """
    Convert the value of a setting to TOML types, as a recipe writes it. A leading @ or $ in a string is doubled.

    None stays None, for the caller to leave out. None is omitted from the fields of an attrs class.
    """
    match value:
        case Enum():
            return convert_to_toml_types(value.value)
        case str() | PurePath():
            text = str(value)
            # A single @ or $ would read back as a reference.
            return text[0] + text if text[:1] in ("@", "$") else text
        case list() | tuple():
            return [convert_to_toml_types(item) for item in value]
        case Mapping():
            return {name: convert_to_toml_types(item) for name, item in value.items()}
        case _ if attrs.has(type(value)):
            fields = [field for field in attrs.fields(type(value)) if field.init]
            table = {field.alias: getattr(value, field.name) for field in fields}
            return {name: convert_to_toml_types(item) for name, item in table.items() if item is not None}
    return value


def flatten_inline_nodes(plain: Mapping[str, Mapping[str, Any]]) -> Plain:
    """Return the same nodes with inline nodes at the top level, under the names assigned in a graph."""
    flat: Plain = {}
    for name, node in plain.items():
        flat |= _flatten_node(name, node)
    return flat


def _flatten_node(name: str, node: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    inline_nodes: list[tuple[str, Mapping[str, Any]]] = []
    yield (
        name,
        {
            key: part if key == "use" else _lift_inline_nodes(part, f"{name}.{key}", inline_nodes)
            for key, part in node.items()
        },
    )
    for inner, table in inline_nodes:
        yield from _flatten_node(inner, table)


def _lift_inline_nodes(part: Any, name: str, inline_nodes: list[tuple[str, Mapping[str, Any]]]) -> Any:
    """Replace every inline node in a value by "@name", and collect the nodes."""
    if isinstance(part, Mapping) and isinstance(part.get("use"), str):
        inline_nodes.append((name, part))
        return f"@{name}"
    if isinstance(part, Mapping):
        return {key: _lift_inline_nodes(inner, f"{name}.{key}", inline_nodes) for key, inner in part.items()}
    if isinstance(part, list):
        return [_lift_inline_nodes(inner, f"{name}[{number}]", inline_nodes) for number, inner in enumerate(part)]
    return part


def describe_provenance(graph: Graph, node: Node, key: str) -> str:
    """
    Return the origin of a setting or edge: a file, a variable, the command line, a default, or its type.

    Positions in shipped recipes are independent of their installation. A table has a position per layer.
    """
    item = node.table.items.get(key)
    if item is None:
        edge = node.edges.get(key)
        return f"the only {node.spec.fields[key].target}" if edge and not edge.written else "default"
    if key == "use" and node.spec.distribution:
        return f"{node.spec.distribution}; {item.position_label}"
    parts = [item] if isinstance(item, Leaf) else [*iterate_leaves(item)]
    first_of_layer = {id(leaf.layer): leaf for leaf in reversed(parts)}
    labels = []
    for leaf in reversed(first_of_layer.values()):
        variable = find_variable_used_as_whole_value(graph, leaf)
        labels.append(
            f"{leaf.position_label} {leaf.value} {variable.position_label}" if variable else leaf.position_label
        )
    return " and ".join(labels) or item.position_label


def find_variable_used_as_whole_value(graph: Graph, leaf: Leaf) -> Leaf | None:
    """Return the variable written as a leaf's whole value, or None."""
    name = leaf.value if isinstance(leaf.value, str) else ""
    return graph.recipe.vars.get(name.removeprefix(VARIABLE)) if name.startswith(VARIABLE) else None
