"""Explain why an edge has no target: a node is missing or does not fit, or several do."""

from collections.abc import Mapping

from drawloom.graph.problems import KeyPath, did_you_mean
from drawloom.graph.recipe.merged import MergedRecipe
from drawloom.graph.registry.registry import Field, Registry
from drawloom.graph.types.port_match import find_mismatches, implements_any, join_mismatches
from drawloom.graph.wiring.node import Node, format_path

MAX_CANDIDATES_SHOWN = 6
"""Candidates for an edge in a message."""


def report_missing_target(node: Node, name: str, path: KeyPath, many: bool, recipe: MergedRecipe) -> None:
    """Report an edge to an unknown node or group."""
    group = name.removesuffix(".*")
    if group in recipe.groups:
        hint = (
            f'write "@{group}.*" for all its members'
            if many
            else "this edge accepts a single node: name a member of the group"
        )
        text = f"{format_path(path)}: {group!r} is a group, not a node"
    else:
        text = f"{format_path(path)}: there is no {'group' if name.endswith('.*') else 'node'} {group!r}"
        hint = did_you_mean(group, recipe.groups if name.endswith(".*") else recipe.nodes)
    node.add_problem("DL313", text, hint, path)


def report_missing_or_ambiguous_target(
    node: Node, field: Field, fitting: list[str], nodes: Mapping[str, Node], registry: Registry
) -> None:
    """Report that none or several of the recipe's `nodes` fit an edge which the recipe leaves out."""
    port = " or ".join(port.__name__ for port in field.ports)
    if not fitting:
        text = f"{node.spec.use!r} needs a {port} for {field.name!r}, but no node implements it"
        uses = [spec.use for spec in registry.specs() if implements_any(spec.cls, field.ports)]
        more = " or another" if len(uses) > MAX_CANDIDATES_SHOWN else ""
        named = " or ".join(f'"{use}"' for use in uses[:MAX_CANDIDATES_SHOWN])
        hint = f"add a node with use = {named}{more}" if uses else "add a node that implements it"
        if (namesake := nodes.get(field.name)) is not None:  # another component was written there
            text += f": {explain_misfit(namesake, field)}"
            hint = f"`drawloom list --fits {namesake.name}` lists the components that do"
        return node.add_problem("DL316", text, hint)
    remaining = [f"{len(fitting) - MAX_CANDIDATES_SHOWN} more"] if len(fitting) > MAX_CANDIDATES_SHOWN else []
    *most, last = [*(f"[{name}]" for name in fitting[:MAX_CANDIDATES_SHOWN]), *remaining]
    names = f"{', '.join(most)} and {last}"
    hint = "write " + " or ".join(f'{field.name} = "@{name}"' for name in fitting[:MAX_CANDIDATES_SHOWN])
    quantifier = "both" if len(fitting) == 2 else "all"
    node.add_problem("DL316", f"{field.name!r} needs one {port}, but {names} {quantifier} implement it", hint)


def explain_misfit(node: Node, field: Field) -> str:
    """Return a node's component, and why it does not implement a field's port."""
    why = join_mismatches([reason for port in field.ports for reason in find_mismatches(node.spec.cls, port)[:2]])
    return f"[{node.name}] is {node.spec.use!r}: it {why}"
