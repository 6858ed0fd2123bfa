"""`drawloom explain`: the origin of values, the reason for connections, and the users of nodes."""

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from drawloom.graph.inspect.serialize import (
    convert_to_toml_types,
    describe_provenance,
    find_variable_used_as_whole_value,
)
from drawloom.graph.problems import KeyPath, UserError, did_you_mean
from drawloom.graph.recipe.layers import Leaf, Table, iterate_leaves
from drawloom.graph.recipe.merged import VARIABLE
from drawloom.graph.registry.registry import Field
from drawloom.graph.toml.emit import dump_toml
from drawloom.graph.types.describe import describe_type, dump_toml_or_repr
from drawloom.graph.wiring.graph import Graph
from drawloom.graph.wiring.node import Node, format_path

STEP = re.compile(r"\[(\d+)\]|\.?([^.\[\]]+)")


def explain(graph: Graph, target: str, root: str) -> str:
    """Explain a recipe, a node, a key of a node or a part of its value. Raises UserError for an unknown target."""
    if not target:
        layers = ", then ".join(layer.source for layer in graph.recipe.layers if layer.data)
        nodes = [f"[{name}] {node.spec.use}: {node.spec.summary}" for name, node in graph.nodes.items()]
        return "\n".join([layers, *nodes])
    if target in graph.nodes:
        return "\n".join(_explain_node(graph, graph.nodes[target], root))
    # Longest names first: "a.b.c" may be the key c of the node a.b or a part of the key b of the node a.
    for name in sorted(graph.nodes, key=len, reverse=True):
        path = _parse_path(target[len(name) :]) if target.startswith(f"{name}.") else ()
        if path and str(path[0]) in graph.nodes[name].spec.fields:
            return "\n".join(_explain_key(graph, graph.nodes[name], path))
    name = target.rpartition(".")[0]
    fields = graph.nodes[name].spec.fields if name in graph.nodes else ()
    hint = did_you_mean(target, [f"{name}.{field}" for field in fields] or graph.nodes)
    raise UserError(f"there is no {target!r} to explain; {hint}".rstrip("; "), 2)


def format_variable_history(graph: Graph, name: str) -> str:
    """Return all values set for a variable, newest first. Empty if the variable does not exist."""
    history = graph.recipe.vars[name].history() if name in graph.recipe.vars else ()
    return "\n".join(f"{VARIABLE}{name} = {dump_toml(leaf.value)}  {leaf.key_position}" for leaf in history)


def _parse_path(text: str) -> KeyPath:
    return tuple(int(number) if number else key for number, key in STEP.findall(text))


def _explain_node(graph: Graph, node: Node, root: str) -> Iterator[str]:
    yield f"[{node.name}] {node.spec.use}, {node.position}"
    yield from _indent(inspect.cleandoc(node.spec.cls.__doc__ or "").splitlines())
    if provided := [
        port.__name__ for port in list_needed_ports(graph) if port in graph.list_needed_ports_implemented_by(node.name)
    ]:
        yield f"  implements {', '.join(provided)}"
    fields = node.spec.fields.values()
    yield from _format_section("settings", [_format_setting(graph, node, f) for f in fields if f.kind == "setting"])
    yield from _format_section("edges", [_format_edge(graph, node, f) for f in fields if f.is_edge])
    yield from _format_section(
        "filled by the container",
        [_format_container_field(graph, f, root) for f in fields if f.kind in ("every", "recipe")],
    )
    yield from _format_section("notes", [*collect_notes(graph, node)])
    users = [f"[{user}] {', '.join(keys)}" for user, keys in graph.list_users_with_edge_names(node.name)]
    yield from _format_section("used by", users or ["no node"])
    yield from _format_section(
        "order", [*describe_build_position(graph, node.name, root), *describe_positions_in_sequences(graph, node.name)]
    )


def collect_notes(graph: Graph, node: Node) -> Iterable[str]:
    """Return a component's notes about a node. Empty unless the node and its neighbours are valid."""
    notes = getattr(node.spec.cls, "notes", None)
    return notes(graph.view(node.name)) if notes and graph.is_valid_with_neighbours(node) else ()


def _format_section(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"  {title}"
        yield from _indent(f"  {line}" for line in lines)


def _indent(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}".rstrip() for line in lines)


def _format_setting(graph: Graph, node: Node, field: Field) -> str:
    kind = describe_type(field.type)
    if field.name not in node.settings:  # an editor also explains recipes with problems
        origin = (
            f"invalid; {describe_provenance(graph, node, field.name)}" if field.name in node.table.items else "missing"
        )
        return f"{field.name}  ({kind}; {origin})"
    value = _format_value(node.settings[field.name])
    return f"{field.name} = {value}  ({kind}; {describe_provenance(graph, node, field.name)})"


def _format_edge(graph: Graph, node: Node, field: Field) -> str:
    edge = node.edges.get(field.name)
    leads = ", ".join(f"[{target}]" for target in edge.targets) if edge and edge.targets else "none"
    return f"{field.name} -> {leads}  ({field.target}; {describe_provenance(graph, node, field.name)})"


def _format_container_field(graph: Graph, field: Field, root: str) -> str:
    """Format a field filled by the container: with the recipe, or with all nodes implementing one of its ports."""
    if field.kind == "recipe":
        return f"{field.name}: the resolved recipe"
    fitting = [
        f"[{name}]"
        for name in graph.topological_order([root])
        if graph.list_needed_ports_implemented_by(name) & set(field.ports)
    ]
    return f"{field.name}: every {' or '.join(port.__name__ for port in field.ports)}: {', '.join(fitting) or 'none'}"


def _format_value(value: Any) -> str:
    return "none" if value is None else dump_toml_or_repr(convert_to_toml_types(value))


def _explain_key(graph: Graph, node: Node, path: KeyPath) -> Iterator[str]:
    field = node.spec.fields[str(path[0])]
    if field.kind in ("every", "recipe"):
        yield f"[{node.name}] {field.name} is filled by the container"
        return
    line = _format_setting(graph, node, field) if field.kind == "setting" else _format_edge(graph, node, field)
    yield f"[{node.name}] {line}"
    if field.doc:
        yield f"  {field.doc}"
    if field.kind == "setting":
        yield f"  impact of another value on a resumed run: {field.impact}"
    item, rest = _find_item_and_rest_of_path(node.table.items.get(field.name), path[1:])
    for leaf in iterate_leaves(item) if item else ():
        yield from _indent(_format_history(graph, leaf, rest))
    if not field.required and field.kind == "setting" and not path[1:]:
        yield f"  {_format_value(field.default_value())}  default"


def _find_item_and_rest_of_path(item: Leaf | Table | None, path: KeyPath) -> tuple[Leaf | Table | None, KeyPath]:
    """Follow a path through tables. Return the item, and the rest of the path inside the value of a leaf."""
    while path and isinstance(item, Table):
        item, path = item.items.get(str(path[0])), path[1:]
    return item, path


def _format_history(graph: Graph, leaf: Leaf, rest: KeyPath) -> Iterator[str]:
    """Yield all values set for a leaf, newest first, followed by its variable's values."""
    prefix = f"{format_path(leaf.path[-1:])}: " if rest else ""
    for entry in leaf.history():
        if rest and entry.elements is not None:  # the same index is another element of the list that was edited
            yield f"{prefix}{_format_part(entry.value, rest)}  {entry.origin(rest).position}"
            return
        position = entry.layer.value_position((*entry.path, *rest)) if rest else entry.key_position
        yield f"{prefix}{_format_part(entry.value, rest)}  {position}"
        yield from _indent(() if rest else _format_edits(entry))
        variable = find_variable_used_as_whole_value(graph, entry)
        yield from (
            f"  {dump_toml(value.value)}  {value.key_position}" for value in (variable.history() if variable else ())
        )


def _format_edits(leaf: Leaf) -> Iterator[str]:
    """Yield the elements removed from a list or inserted into it by an edit."""
    yield from (f"removed {dump_toml(value)}" for value in leaf.removed)
    for value, origin in zip(leaf.value, leaf.elements, strict=True) if leaf.elements else ():
        if origin.layer is leaf.layer and origin.path[: len(leaf.path)] == leaf.path:
            yield f"inserted {dump_toml(value)}  {origin.position}"


def _format_part(plain: Any, path: KeyPath) -> str:
    for step in path:
        try:
            plain = plain[step]
        except (LookupError, TypeError):
            return "nothing"
    return dump_toml(plain)


# 11th, 12th and 13th are exceptions.
ORDINAL_SUFFIXES = {1: "st", 2: "nd", 3: "rd"}


def list_needed_ports(graph: Graph) -> list[type]:
    """Return the ports needed by edges in the graph, without duplicates."""
    fields = (field for node in graph.nodes.values() for field in node.spec.fields.values())
    return list(dict.fromkeys(port for field in fields for port in field.ports))


def describe_build_position(graph: Graph, name: str, root: str) -> Iterator[str]:
    """Yield a node's position in the order of building."""
    order = graph.topological_order([root])
    if name not in order:
        yield f"not built: no node that [{root}] needs refers to it"
        return
    needs = ", ".join(f"[{need}]" for need in graph.needs(name))
    yield f"built {format_ordinal(order.index(name) + 1)} of {len(order)}{f', after {needs}' if needs else ''}"


def describe_positions_in_sequences(graph: Graph, name: str) -> Iterator[str]:
    """Yield the node's position in every sequence containing it, and the values passing through the node."""
    for user, keys in graph.list_users_with_edge_names(name):
        for key in keys:
            if graph.nodes[user].spec.fields[key].kind == "ordered":
                yield from _describe_sequence_position(
                    graph, name, graph.nodes[user].edges[key].targets, f"[{user}] {key}"
                )


def _describe_sequence_position(graph: Graph, name: str, members: tuple[str, ...], title: str) -> Iterator[str]:
    flow = graph.nodes[name].spec.traits.flow
    number = members.index(name)
    yield f"{format_ordinal(number + 1)} of {len(members)} in {title}"
    before, after = members[:number], members[number + 1 :]
    for value in (*flow.reads, *flow.changes):
        plain = value.removesuffix("?")
        verb = "changes" if value in flow.changes else "reads"
        writers = [f"[{other}]" for other in before if plain in graph.nodes[other].spec.traits.flow.writes]
        if writers or value == plain:
            yield f"  {verb} {plain}, written by {' and '.join(writers) or 'no member'}"
    for value in flow.writes:
        readers = [f"[{other}]" for other in after if _does_member_use_value(graph, other, value)]
        yield f"  writes {value}, consumed by {' and '.join(readers) or 'no later member'}"


def _does_member_use_value(graph: Graph, name: str, value: str) -> bool:
    flow = graph.nodes[name].spec.traits.flow
    return bool({value, f"{value}?"} & {*flow.reads, *flow.changes})


def format_ordinal(number: int) -> str:
    """Return 1st, 2nd, 3rd, 4th ..."""
    end = "th" if number % 100 in (11, 12, 13) else ORDINAL_SUFFIXES.get(number % 10, "th")
    return f"{number}{end}"
