"""The resolved recipe: every node with every setting and edge written out, as TOML 1.0 that reads back the same."""

import hashlib
import json
from typing import Any

from drawloom.graph.catalogue import Catalogue
from drawloom.graph.changes import changes
from drawloom.graph.graph import Graph
from drawloom.graph.node import Node
from drawloom.graph.recipe import FORMAT
from drawloom.graph.resolved import ResolvedRecipe
from drawloom.graph.values import Values
from drawloom.graph.writing import key, value


def resolve(graph: Graph, catalogue: Catalogue, *, accept_changes: bool = False) -> ResolvedRecipe:
    """A graph without faults as text, with the hash of what it says."""
    plain = {name: plain_node(graph, node) for name, node in graph.nodes.items() if not node.owner}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    return ResolvedRecipe(
        _text(plain, graph), digest, accept_changes, lambda older: changes(older, graph, plain, catalogue)
    )


def plain_node(graph: Graph, node: Node) -> dict[str, Any]:
    """`use`, settings and edges as a recipe would write them; what has no value in TOML is left out."""
    plain: dict[str, Any] = {"use": node.spec.use}
    for name, field in node.spec.fields.items():
        if field.kind == "setting" and node.settings.get(name) is not None:
            plain[name] = escape(Values().unstructure(node.settings[name]))
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
    return plain_node(graph, target) if target.owner else f"@{name}"


def escape(plain: Any) -> Any:
    """Plain values as a recipe writes them: a leading @ or $ is doubled."""
    if isinstance(plain, str) and plain[:1] in ("@", "$"):
        return plain[0] + plain
    if isinstance(plain, list):
        return [escape(part) for part in plain]
    if isinstance(plain, dict):
        return {name: escape(part) for name, part in plain.items()}
    return plain


def _text(plain: dict[str, dict[str, Any]], graph: Graph) -> str:
    lines = [f"format = {FORMAT}"]
    for name, node in plain.items():
        lines += ["", f"[{'.'.join(key(part) for part in name.split('.'))}]"]
        lines += [f"{key(name)} = {value(part)}" for name, part in node.items()]
    empty = [name for name, members in graph.recipe.groups.items() if not members]
    lines += [line for name in empty for line in ("", f"[{key(name)}]")]
    return "\n".join(lines) + "\n"
