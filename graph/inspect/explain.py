"""Where values come from, why nodes are connected as they are, and who uses whom."""

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import Any

from drawloom.graph.build.graph import Graph
from drawloom.graph.build.node import Node, dotted
from drawloom.graph.inspect.listing import ports
from drawloom.graph.inspect.position import needed_ports, place_in_order, places_in_sequences
from drawloom.graph.inspect.provenance import leaves, provenance, variable
from drawloom.graph.inspect.serialize import escape
from drawloom.graph.problems import UserError
from drawloom.graph.recipe.layers import Leaf, Path, Table
from drawloom.graph.registry.spec import Field
from drawloom.graph.toml.emit import dumps
from drawloom.graph.toml.suggest import did_you_mean
from drawloom.graph.types.structure import Values

STEP = re.compile(r"\[(\d+)\]|\.?([^.\[\]]+)")


def explain(graph: Graph, target: str, root: str) -> str:
    """A whole recipe, a node, a key of a node, or a part of its value, in words."""
    if not target:
        return "\n".join(_explain_recipe(graph))
    if target in graph.nodes:
        return "\n".join(_explain_node(graph, graph.nodes[target], root))
    for name in sorted(graph.nodes, key=len, reverse=True):
        path = _path(target[len(name) :]) if target.startswith(f"{name}.") else ()
        if path and str(path[0]) in graph.nodes[name].spec.fields:
            return "\n".join(_explain_key(graph, graph.nodes[name], path))
    raise UserError(f"there is no {target!r} to explain; {_near(graph, target)}".rstrip("; "), 2)


def _near(graph: Graph, target: str) -> str:
    name = target.rpartition(".")[0]
    fields = graph.nodes[name].spec.fields if name in graph.nodes else ()
    return did_you_mean(target, [f"{name}.{field}" for field in fields] or graph.nodes)


def _path(text: str) -> Path:
    return tuple(int(number) if number else key for number, key in STEP.findall(text))


def _explain_recipe(graph: Graph) -> Iterator[str]:
    yield f"{', then '.join(layer.source for layer in graph.recipe.layers if layer.data)}"
    yield from (f"[{name}] {node.spec.use}: {node.spec.doc}" for name, node in graph.nodes.items())


def _explain_node(graph: Graph, node: Node, root: str) -> Iterator[str]:
    yield f"[{node.name}] {node.spec.use}, {node.place}"
    yield from _indented(inspect.cleandoc(node.spec.cls.__doc__ or "").splitlines())
    if provided := [port.__name__ for port in needed_ports(graph) if port in graph.provides(node.name)]:
        yield f"  it is a {', a '.join(provided)}"
    fields = node.spec.fields.values()
    yield from _section("settings", [_setting_line(graph, node, f) for f in fields if f.kind == "setting"])
    yield from _section("edges", [_edge_line(graph, node, f) for f in fields if f.is_edge])
    yield from _section("filled in", [_filled_line(graph, f, root) for f in fields if f.kind in ("every", "recipe")])
    yield from _section("notes", [*_notes(graph, node)])
    used = [f"[{user}] {', '.join(keys)}" for user, keys in graph.incoming(node.name)]
    yield from _section("used by", used or ["nobody"])
    yield from _section("place", [*place_in_order(graph, node.name, root), *places_in_sequences(graph, node.name)])


def _notes(graph: Graph, node: Node) -> Iterable[str]:
    """What the component itself says of the node, unless it is at fault."""
    notes = getattr(node.spec.cls, "notes", None)
    return notes(graph.view(node.name)) if notes and not node.invalid else ()


def _section(title: str, lines: list[str]) -> Iterator[str]:
    if lines:
        yield f"  {title}"
        yield from _indented(f"  {line}" for line in lines)


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (f"  {line}".rstrip() for line in lines)


def _setting_line(graph: Graph, node: Node, field: Field) -> str:
    kind = Values.describe_type(field.type)
    return f"{field.name} = {_shown(node, field)}  ({kind}; {provenance(graph, node, field.name)})"


def _edge_line(graph: Graph, node: Node, field: Field) -> str:
    edge = node.edges.get(field.name)
    leads = ", ".join(f"[{target}]" for target in edge.targets) if edge and edge.targets else "none"
    return f"{field.name} -> {leads}  ({ports(field)}; {provenance(graph, node, field.name)})"


def _filled_line(graph: Graph, field: Field, root: str) -> str:
    if field.kind == "recipe":
        return f"{field.name}: the resolved recipe"
    fitting = [f"[{name}]" for name in graph.topological_order([root]) if graph.provides(name) & set(field.ports)]
    return f"{field.name}: every {' or '.join(port.__name__ for port in field.ports)}: {', '.join(fitting) or 'none'}"


def _shown(node: Node, field: Field) -> str:
    return _text(escape(Values.unstructure(node.settings[field.name])))


def _text(plain: Any) -> str:
    return "none" if plain is None else dumps(plain)


def _explain_key(graph: Graph, node: Node, path: Path) -> Iterator[str]:
    field = node.spec.fields[str(path[0])]
    if field.kind in ("every", "recipe"):
        yield f"[{node.name}] {field.name} is filled in by the container"
        return
    line = _setting_line(graph, node, field) if field.kind == "setting" else _edge_line(graph, node, field)
    yield f"[{node.name}] {line}"
    if field.doc:
        yield f"  {field.doc}"
    if field.kind == "setting":
        yield f"  for a run that resumes, another value is a {field.change} change"
    item, rest = _descend(node.table.items.get(field.name), path[1:])
    for leaf in leaves(item) if item else ():
        yield from _indented(_stack(graph, leaf, rest))
    if not field.required and field.kind == "setting" and not path[1:]:
        yield f"  {_text(escape(Values.unstructure(field.default_value())))}  default"


def _descend(item: Leaf | Table | None, path: Path) -> tuple[Leaf | Table | None, Path]:
    """As far down a path as tables go; the rest leads into the value of a leaf."""
    while path and isinstance(item, Table):
        item, path = item.items.get(str(path[0])), path[1:]
    return item, path


def _stack(graph: Graph, leaf: Leaf, rest: Path) -> Iterator[str]:
    """Everything that set a value, newest first; under a variable, everything that set that."""
    within = f"{dotted(leaf.path[-1:])}: " if rest else ""
    for one in leaf.history():
        yield f"{within}{_part(one.value, rest)}  {one.layer.value((*one.path, *rest)) if rest else one.key_place}"
        behind = variable(graph, one)
        yield from (f"  {dumps(under.value)}  {under.key_place}" for under in (behind.history() if behind else ()))


def _part(plain: Any, path: Path) -> str:
    for step in path:
        try:
            plain = plain[step]
        except (LookupError, TypeError):
            return "nothing"
    return dumps(plain)
