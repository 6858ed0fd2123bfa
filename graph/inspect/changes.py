"""Differences between two recipes, by node and key."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from drawloom.graph.component import Impact
from drawloom.graph.inspect.serialize import (
    Plain,
    find_variable_used_as_whole_value,
    flatten_inline_nodes,
    serialize_nodes,
    serialize_recipe,
)
from drawloom.graph.problems import Problem, RecipeError
from drawloom.graph.recipe.layers import Leaf
from drawloom.graph.recipe.lockfile import RecipeChange
from drawloom.graph.recipe.merged import MergedRecipe
from drawloom.graph.toml.emit import dump_canonical, dump_toml
from drawloom.graph.toml.parsing import parse
from drawloom.graph.wiring.graph import Graph
from drawloom.graph.wiring.node import Node

IMPACTS: tuple[Impact, ...] = ("safe", "changes_training", "incompatible")

ABSENT = "absent"


def compare_with_text(older: str, graph: Graph) -> list[RecipeChange]:
    """Return differences from `older`, a resolved recipe's text, to `graph`. Raises ValueError if it is not TOML."""
    try:
        recipe = MergedRecipe.from_values(parse(older))
    except RecipeError as error:
        problem = error.problems[0]
        raise ValueError(f"line {problem.position.line if problem.position else 0}: {problem.text}") from error
    return compare_with_nodes(serialize_recipe(recipe), graph)


def compare_with_nodes(old: Plain, graph: Graph) -> list[RecipeChange]:
    """
    Return differences from the nodes `old` to `graph`.

    Only the written values are compared, because the components of `old` may have changed or no longer exist.
    """
    new = serialize_nodes(graph.nodes, recorded=True)
    return list(_Comparison(flatten_inline_nodes(old), flatten_inline_nodes(new), graph).find_changes())


@attrs.frozen
class _Comparison:
    """Comparison between two serialized recipes, node by node; `graph` is the new recipe's."""

    old: Plain
    new: Plain
    graph: Graph

    def find_changes(self) -> Iterator[RecipeChange]:
        """Yield added and removed nodes, nodes with another component, and other nodes' changed keys."""
        for name in {**self.old, **self.new}:
            old, new = self.old.get(name), self.new.get(name)
            if old is None or new is None:
                yield RecipeChange(name, "", _format_use(old), _format_use(new), self._find_greatest_impact([name]))
            elif old["use"] != new["use"]:
                yield RecipeChange(name, "use", _format_use(old), _format_use(new), self._find_greatest_impact([name]))
            else:
                yield from self._compare_keys(name, old, new)

    def _compare_keys(self, name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[RecipeChange]:
        for key in {**old, **new}:
            before, after = old.get(key), new.get(key)
            if before is None or after is None or dump_canonical(before) != dump_canonical(after):
                is_edge = is_edge_value(before) or is_edge_value(after)
                own, why = self._find_declared_impact_and_reason(name, key, before)
                field = self.graph.nodes[name].spec.fields.get(key)
                declared = field.impact if field else "changes_training"
                impact = own or (self._find_edge_impact(before, after) if is_edge else declared)
                yield RecipeChange(
                    name, key, _format_value(before), _format_value(after), impact, edge=is_edge, why=why
                )

    def _find_declared_impact_and_reason(self, name: str, key: str, before: Any) -> tuple[Impact | None, str]:
        """Return impact and reason according to the component itself for a changed key, or (None, "")."""
        resume_impact = getattr(self.graph.nodes[name].spec.cls, "resume_impact", None)
        impact = resume_impact(self.graph.view(name), key, before) if resume_impact else None
        return impact if isinstance(impact, tuple) else (impact, "")

    def _find_edge_impact(self, before: Any, after: Any) -> Impact:
        old, new = list_edge_targets(before), list_edge_targets(after)
        reordered = [target for target in old if target in new] != [target for target in new if target in old]
        # The order of phases and listeners can matter, whatever impact their components declare.
        return "changes_training" if reordered else self._find_greatest_impact(set(old) ^ set(new))

    def _find_greatest_impact(self, names: Iterable[str]) -> Impact:
        """Return the impact of adding, removing or swapping nodes: the greatest impact of their components."""
        uses = [str(side[name]["use"]) for name in names for side in (self.old, self.new) if name in side]
        specs = [self.graph.registry.find(use) for use in uses]
        impacts = [spec.traits.impact for spec in specs if not isinstance(spec, Problem)]
        greatest: Impact = max(impacts, key=IMPACTS.index, default="changes_training")
        # The impact of a component that no longer exists is unknown.
        return greatest if len(impacts) == len(specs) else "changes_training"


def is_edge_value(part: Any) -> bool:
    """Return whether a serialized value is an edge."""
    if isinstance(part, str):
        return part[:1] == "@" and part[:2] != "@@"
    members = list(part.values()) if isinstance(part, dict) else part
    return isinstance(members, list) and bool(members) and all(isinstance(m, str) and is_edge_value(m) for m in members)


def list_edge_targets(edge: Any) -> list[str]:
    """Return the target nodes of a serialized edge."""
    members = list(edge.values()) if isinstance(edge, dict) else edge if isinstance(edge, list) else [edge]
    return [member.removeprefix("@") for member in members if isinstance(member, str)]


def _format_use(node: Mapping[str, Any] | None) -> str:
    return ABSENT if node is None else str(node["use"])


def _format_value(part: Any) -> str:
    return ABSENT if part is None else dump_toml(part)


def diff(old: MergedRecipe, new: Graph) -> list[RecipeChange]:
    """
    Return differences from a recipe to a graph and, if neither is resolved, cosmetic differences in how they are
    written.

    The components of a resolved old recipe may have changed since. Raises RecipeError if the new recipe has errors, or
    if an unresolved old recipe has errors.
    """
    new.require_valid()
    if old.is_resolved:
        return compare_with_nodes(serialize_recipe(old), new)
    graph = Graph.build(old, new.registry).require_valid()
    cosmetic = [] if new.recipe.is_resolved else list(_find_cosmetic_changes(graph, new))
    return compare_with_nodes(serialize_nodes(graph.nodes, recorded=True), new) + cosmetic


def _find_cosmetic_changes(old: Graph, new: Graph) -> Iterator[RecipeChange]:
    before, after = serialize_nodes(old.nodes), serialize_nodes(new.nodes)
    common = [name for name in before if name in after]
    for name in common:
        for key in before[name]:
            if (
                key != "use"
                and key in after[name]
                and dump_canonical(before[name][key]) == dump_canonical(after[name][key])
            ):
                old_writing, new_writing = (_describe_notation(graph, graph.nodes[name], key) for graph in (old, new))
                if old_writing != new_writing:
                    yield RecipeChange(name, key, old_writing, new_writing, "cosmetic")
    if common != [name for name in after if name in before]:
        yield RecipeChange("", "", "tables", "reordered", "cosmetic")


def _describe_notation(graph: Graph, node: Node, key: str) -> str:
    """Return how a recipe writes a value: as a variable, literally, or not at all."""
    item = node.table.items.get(key)
    if isinstance(item, Leaf) and find_variable_used_as_whole_value(graph, item):
        return str(item.value)
    return "left out" if item is None else "written"
