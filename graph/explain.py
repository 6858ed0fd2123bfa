"""Where values come from, why nodes are connected as they are, and who uses whom."""

from collections.abc import Iterator

from drawloom.graph.graph import Graph
from drawloom.graph.layers import Leaf, Table
from drawloom.graph.listing import ports
from drawloom.graph.node import Node
from drawloom.graph.problems import UserError
from drawloom.graph.resolving import escape
from drawloom.graph.settling import VARIABLE
from drawloom.graph.spec import Field
from drawloom.graph.suggest import did_you_mean
from drawloom.graph.values import Values
from drawloom.graph.writing import value


def explain(graph: Graph, target: str, root: str) -> str:
    """A whole recipe, a node, or one key of a node, in words."""
    if not target:
        return "\n".join(f"[{name}] {graph.nodes[name].spec.use}: {graph.nodes[name].spec.doc}" for name in graph.nodes)
    if target in graph.nodes:
        return "\n".join(_explain_node(graph, graph.nodes[target], root))
    name, _, key = target.rpartition(".")
    if name in graph.nodes and key in graph.nodes[name].spec.fields:
        return "\n".join(_explain_key(graph, graph.nodes[name], graph.nodes[name].spec.fields[key]))
    known = [f"{name}.{field}" for field in graph.nodes[name].spec.fields] if name in graph.nodes else graph.nodes
    raise UserError(f"there is no {target!r} to explain; {did_you_mean(target, known)}".rstrip("; "), 2)


def _explain_node(graph: Graph, node: Node, root: str) -> Iterator[str]:
    yield f"[{node.name}] {node.spec.use}, {node.place}"
    yield f"  {node.spec.doc}"
    for field in node.spec.fields.values():
        if field.kind == "setting" or field.is_edge:
            yield f"  {_line(graph, node, field)}"
    users = graph.users(node.name)
    yield f"  used by {', '.join(f'[{user}]' for user in users) or 'nobody'}"
    order = graph.closure([root])
    if node.name in order:
        yield f"  built as number {order.index(node.name) + 1} of {len(order)}"
    flow = node.spec.traits.flow
    for verb, names in (("reads", flow.reads), ("writes", flow.writes), ("changes", flow.changes)):
        if names:
            yield f"  {verb} {', '.join(names)}"


def _line(graph: Graph, node: Node, field: Field) -> str:
    if field.kind == "setting":
        return f"{field.name} = {_shown(node, field)}  ({_origin(node, field)})"
    edge = node.edges.get(field.name)
    targets = ", ".join(f"[{target}]" for target in edge.targets) if edge else ""
    if edge and not edge.written:
        return f"{field.name} -> {targets}  (the only {ports(field)})"
    return f"{field.name} -> {targets or 'none'}  ({_origin(node, field)})"


def _shown(node: Node, field: Field) -> str:
    plain = escape(Values().unstructure(node.settings[field.name]))
    return "none" if plain is None else value(plain)


def _origin(node: Node, field: Field) -> str:
    item = node.table.items.get(field.name)
    return "default" if item is None else str(item.key_place if isinstance(item, Leaf) else item.place)


def _explain_key(graph: Graph, node: Node, field: Field) -> Iterator[str]:
    yield f"[{node.name}] {_line(graph, node, field)}"
    if field.doc:
        yield f"  {field.doc}"
    item = node.table.items.get(field.name)
    if isinstance(item, Leaf):
        yield from (f"  {line}" for leaf in item.stack() for line in _layer(graph, leaf))
    elif isinstance(item, Table):
        yield f"  a table at {item.place}"
    if not field.required:
        default = Values().unstructure(field.default_value())
        yield f"  {'none' if default is None else value(default)}  default"


def _layer(graph: Graph, leaf: Leaf) -> Iterator[str]:
    yield f"{value(leaf.value)}  {leaf.key_place}"
    name = leaf.value.removeprefix(VARIABLE) if isinstance(leaf.value, str) else ""
    if isinstance(leaf.value, str) and leaf.value.startswith(VARIABLE) and name in graph.recipe.vars:
        yield from (f"  {value(under.value)}  {under.key_place}" for under in graph.recipe.vars[name].stack())
