"""The resolved recipe of a graph: all settings and edges as TOML, with their origins, and a hash."""

import hashlib
import os
from pathlib import Path

from drawloom.graph.inspect.serialize import Plain, describe_provenance, serialize_nodes
from drawloom.graph.recipe.layers import STARTED_IN
from drawloom.graph.recipe.lockfile import RecipeChange, ResolvedRecipe
from drawloom.graph.recipe.merged import FORMAT
from drawloom.graph.toml.emit import dump_canonical, dump_key, dump_toml
from drawloom.graph.wiring.graph import Graph
from drawloom.graph.wiring.node import Node

MAX_ALIGNED_WIDTH = 60
"""Longest line that counts for aligning the provenance comments of a table in one column."""


def make_resolved_recipe(graph: Graph, *, accept_changes: bool = False) -> ResolvedRecipe:
    """Return a valid graph's resolved recipe."""

    def find_changes(older: str) -> list[RecipeChange]:
        """Return differences from a resolved recipe's text; ValueError if it is not TOML."""
        from drawloom.graph.inspect.changes import compare_with_text  # for resumes

        return compare_with_text(older, graph)

    def draw_svg(step: bool) -> str:
        """Draw the graph, or the dataflow in a training step."""
        from drawloom.graph.drawing.draw import draw  # few runs need pictures

        return draw(graph, Path(graph.recipe.source).stem, graph.root, "svg", step=step)

    return ResolvedRecipe(
        lambda: format_resolved_recipe(graph),
        lambda: hash_recipe(serialize_nodes(graph.nodes, recorded=True)),
        accept_changes,
        find_changes,
        draw_svg,
        lock=lambda: format_resolved_recipe(graph, is_lock=True),
    )


def format_resolved_recipe(graph: Graph, *, is_lock: bool = False) -> str:
    """
    Write every node with every setting and edge, as TOML 1.0 from which the same graph can be read.

    A comment on every line says where the value came from: so a run folder records which values were chosen and which
    are defaults. Comments are not part of the hash. A lock file has relative paths, and the folder for them.
    """
    lines = [f"format = {FORMAT}"]
    if is_lock:
        lines.append(f"{STARTED_IN} = {dump_toml(graph.recipe.folder or os.getcwd())}")
    for name, table in serialize_nodes(graph.nodes, recorded=is_lock).items():
        written = {key: f"{dump_key(key)} = {dump_toml(value)}" for key, value in table.items()}
        width = max(len(line) for key, line in written.items() if len(line) <= MAX_ALIGNED_WIDTH or key == "use")
        lines += ["", f"[{'.'.join(map(dump_key, name.split('.')))}]"]
        lines += [
            f"{line:{width}}  # {_format_origin_comment(graph, graph.nodes[name], key)}"
            for key, line in written.items()
        ]
    # Empty groups are written, so that "@group.*" stays a valid reference.
    empty = [name for name, members in graph.recipe.groups.items() if not members]
    lines += [line for name in empty for line in ("", f"[{dump_key(name)}]")]
    return "\n".join(lines) + "\n"


def _format_origin_comment(graph: Graph, node: Node, key: str) -> str:
    """Return a value's origin as printable text for a TOML comment."""
    # A file name may contain a newline or a control character, which must not end the comment.
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in describe_provenance(graph, node, key))


def hash_recipe(plain: Plain) -> str:
    """Return the hexadecimal SHA-256 of serialized nodes, independent of their order and the order of their keys."""
    return hashlib.sha256(dump_canonical(plain).encode()).hexdigest()
