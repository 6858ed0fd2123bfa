"""What differs between an older resolved recipe and a graph, node by node and key by key, and how much each weighs."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import tomli

from drawloom.graph.catalogue import Catalogue
from drawloom.graph.component import Change
from drawloom.graph.graph import Graph
from drawloom.graph.problems import Problem
from drawloom.graph.recipe import Recipe
from drawloom.graph.resolved import RecipeChange
from drawloom.graph.writing import value

WEIGHTS: tuple[Change, ...] = ("free", "semantic", "structural")

Plain = Mapping[str, Mapping[str, Any]]
"""A recipe as nodes of plain values."""


def changes(older: str, graph: Graph, plain: Plain, catalogue: Catalogue) -> list[RecipeChange]:
    """Differences from `older`, a resolved recipe, to `graph`, whose plain nodes are `plain`."""
    recipe = Recipe.of(tomli.loads(older))
    before = {name: _plain(table) for name, table in recipe.nodes.items()}
    return list(_Comparison(before, plain, graph, catalogue).changes())


def _plain(item: Any) -> Any:
    """A merged table or leaf as the plain value that it was read from."""
    items = getattr(item, "items", None)
    return {key: _plain(part) for key, part in items.items()} if isinstance(items, dict) else item.value


@attrs.frozen
class _Comparison:
    old: Plain
    new: Plain
    graph: Graph
    catalogue: Catalogue

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
            if old.get(key) != new.get(key):
                yield RecipeChange(name, key, _show(old.get(key)), _show(new.get(key)), self._key_weight(name, key))

    def _key_weight(self, name: str, key: str) -> Change:
        node = self.graph.nodes[name]
        weigh = getattr(node.spec.cls, "weigh_change", None)
        weight: Change | None = weigh(self.graph.view(name), key) if weigh else None
        field = node.spec.fields.get(key)
        if weight is not None:
            return weight
        if field is None or not field.is_edge:
            return field.change if field else "semantic"
        old, new = _targets(self.old[name].get(key)), _targets(self.new[name].get(key))
        moved = [target for target in old if target in new] != [target for target in new if target in old]
        return "semantic" if moved else self._weight(set(old) ^ set(new))

    def _weight(self, names: Iterable[str]) -> Change:
        """The weight of adding, removing or swapping nodes: the heaviest of their components'."""
        uses = [side[name]["use"] for name in names for side in (self.old, self.new) if name in side]
        found = [self.catalogue.find(use) for use in uses]
        weights = [spec.traits.change for spec in found if not isinstance(spec, Problem)]
        heaviest: Change = max(weights, key=WEIGHTS.index, default="semantic")
        return heaviest if len(weights) == len(found) else "semantic"


def _targets(edge: Any) -> list[str]:
    """The nodes that a written edge leads to; those in place by their whole text."""
    if isinstance(edge, dict) and "use" not in edge:
        members = list(edge.values())
    else:
        members = edge if isinstance(edge, list) else [] if edge is None else [edge]
    return [member.removeprefix("@") if isinstance(member, str) else _show(member) for member in members]


def _use(node: Mapping[str, Any] | None) -> str:
    return "absent" if node is None else str(node["use"])


def _show(part: Any) -> str:
    return "absent" if part is None else value(part)
