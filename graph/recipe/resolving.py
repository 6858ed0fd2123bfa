"""The resolved recipe: every node with every setting and edge written out, as TOML 1.0 that reads back the same."""

import hashlib
from collections.abc import Iterator
from typing import Any

from drawloom.graph.build.graph import Graph
from drawloom.graph.build.node import Node
from drawloom.graph.inspect.changes import changes_since
from drawloom.graph.inspect.provenance import provenance
from drawloom.graph.inspect.serialize import Plain, serialize_graph
from drawloom.graph.recipe.lockfile import ResolvedRecipe
from drawloom.graph.recipe.recipe import FORMAT
from drawloom.graph.toml.emit import canonical, dump_key, dumps

WIDTH = 60
"""A comment stands behind what is wider; else the comments of a table stand in a column."""


def resolve(graph: Graph, *, accept_changes: bool = False) -> ResolvedRecipe:
    """
    A graph without faults as text, with the hash of what it says.

    A comment behind each line says where it has come from, so that a run folder still tells years later what was
    chosen and what was left as it was. Comments are no part of the hash.
    """
    return ResolvedRecipe(
        lambda: _text(graph),
        lambda: digest(serialize_graph(graph)),
        accept_changes,
        lambda older: changes_since(older, graph),
    )


def digest(plain: Plain) -> str:
    """A hash of nodes, whatever their order and that of their keys."""
    return hashlib.sha256(canonical(plain).encode()).hexdigest()


def _text(graph: Graph) -> str:
    lines = [f"format = {FORMAT}"]
    for name, table in serialize_graph(graph).items():
        lines += ["", f"[{'.'.join(dump_key(part) for part in name.split('.'))}]"]
        lines += _commented(list(_lines(graph, graph.nodes[name], table)))
    empty = [name for name, members in graph.recipe.groups.items() if not members]
    lines += [line for name in empty for line in ("", f"[{dump_key(name)}]")]
    return "\n".join(lines) + "\n"


def _lines(graph: Graph, node: Node, table: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, part in table.items():
        yield f"{dump_key(name)} = {dumps(part)}", provenance(graph, node, name)


def _commented(lines: list[tuple[str, str]]) -> Iterator[str]:
    width = max(len(line) for line, _ in lines if len(line) <= WIDTH or line is lines[0][0])
    for line, comment in lines:
        if not comment.isprintable():
            comment = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in comment)
        yield f"{line:{width}}  # {comment}"
