"""What differs between two recipes, node by node and key by key, and how much each difference weighs."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from drawloom.graph.build.graph import Graph
from drawloom.graph.inspect.serialize import Plain, flatten, serialize_graph, serialize_recipe
from drawloom.graph.problems import Problem
from drawloom.graph.recipe.lockfile import RecipeChange
from drawloom.graph.recipe.recipe import Recipe
from drawloom.graph.setting import Change
from drawloom.graph.toml.emit import canonical, dumps
from drawloom.graph.toml.parsing import Unreadable, parse

WEIGHTS: tuple[Change, ...] = ("free", "semantic", "structural")

ABSENT = "absent"


def changes_since(older: str, graph: Graph) -> list[RecipeChange]:
    """Differences from `older`, the text of a resolved recipe, to `graph`; a ValueError if that can't be read."""
    try:
        recipe = Recipe.of(parse(older))
    except Unreadable as error:
        raise ValueError(f"line {error.line}: {error.text}") from error
    return changes(serialize_recipe(recipe), graph)


def changes(old: Plain, graph: Graph) -> list[RecipeChange]:
    """
    Differences from the nodes `old` to `graph`.

    The components of `old` need not be what they were, nor be there at all: what was written then is compared with
    what is written now.
    """
    return list(_Comparison(flatten(old), flatten(serialize_graph(graph)), graph).changes())


@attrs.frozen
class _Comparison:
    old: Plain
    new: Plain
    graph: Graph

    def changes(self) -> Iterator[RecipeChange]:
        for name in {**self.old, **self.new}:
            old, new = self.old.get(name), self.new.get(name)
            if old is None or new is None:
                yield RecipeChange(name, "", _use(old), _use(new), self._weight([name]))
            elif old["use"] != new["use"]:
                yield RecipeChange(name, "use", _use(old), _use(new), self._weight([name]))
            else:
                yield from self._keys(name, old, new)

    def _keys(self, name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[RecipeChange]:
        for key in {**old, **new}:
            before, after = old.get(key), new.get(key)
            if before is None or after is None or canonical(before) != canonical(after):
                moved = is_edge(before) or is_edge(after)
                weight = self._own_weight(name, key) or (
                    self._edge_weight(before, after) if moved else self._setting_weight(name, key)
                )
                yield RecipeChange(name, key, _show(before), _show(after), weight, edge=moved)

    def _own_weight(self, name: str, key: str) -> Change | None:
        """What the component itself says of a change of one of its keys."""
        weigh = getattr(self.graph.nodes[name].spec.cls, "weigh_change", None)
        return weigh(self.graph.view(name), key) if weigh else None

    def _setting_weight(self, name: str, key: str) -> Change:
        field = self.graph.nodes[name].spec.fields.get(key)
        return field.change if field else "semantic"

    def _edge_weight(self, before: Any, after: Any) -> Change:
        old, new = targets(before), targets(after)
        reordered = [target for target in old if target in new] != [target for target in new if target in old]
        return "semantic" if reordered else self._weight(set(old) ^ set(new))

    def _weight(self, names: Iterable[str]) -> Change:
        """The weight of adding, removing or swapping nodes: the heaviest of their components'."""
        uses = [str(side[name]["use"]) for name in names for side in (self.old, self.new) if name in side]
        found = [self.graph.registry.find(use) for use in uses]
        weights = [spec.traits.change for spec in found if not isinstance(spec, Problem)]
        heaviest: Change = max(weights, key=WEIGHTS.index, default="semantic")
        return heaviest if len(weights) == len(found) else "semantic"


def is_edge(part: Any) -> bool:
    """Whether a plain value leads to nodes."""
    if isinstance(part, str):
        return part[:1] == "@" and part[:2] != "@@"
    members = list(part.values()) if isinstance(part, dict) else part
    return isinstance(members, list) and bool(members) and all(isinstance(m, str) and is_edge(m) for m in members)


def targets(edge: Any) -> list[str]:
    """The nodes that a plain edge leads to."""
    members = list(edge.values()) if isinstance(edge, dict) else edge if isinstance(edge, list) else [edge]
    return [member.removeprefix("@") for member in members if isinstance(member, str)]


def _use(node: Mapping[str, Any] | None) -> str:
    return ABSENT if node is None else str(node["use"])


def _show(part: Any) -> str:
    return ABSENT if part is None else dumps(part)
