"""From a recipe to nodes with settings and edges; whatever is wrong becomes a problem, and none hides another."""

import importlib.util
from collections.abc import Iterator

import attrs

from drawloom.graph.build.edges import EdgeResolver
from drawloom.graph.build.node import Draft
from drawloom.graph.build.settings import SettingsResolver
from drawloom.graph.problems import Problem
from drawloom.graph.recipe.layers import Leaf, Table
from drawloom.graph.recipe.recipe import Recipe
from drawloom.graph.registry.registry import Registry


@attrs.define(eq=False)
class GraphBuilder:
    """The nodes of a recipe, settled and connected; those that could not be made are problems."""

    recipe: Recipe
    registry: Registry
    nodes: dict[str, Draft] = attrs.field(factory=dict)
    incomplete: list[Problem] = attrs.field(factory=list)
    _settling: SettingsResolver = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._settling = SettingsResolver(self.recipe.vars)

    def run(self) -> None:
        """Make every node, then resolve and check every edge."""
        for name, table in self.recipe.nodes.items():
            self._make(name, table)
        connecting = EdgeResolver(self.recipe, self.nodes, self._settling, self._make)
        for node in list(self.nodes.values()):
            connecting.connect_all(node)
        connecting.refuse_unnamed()

    def problems(self) -> Iterator[Problem]:
        """All that is wrong with the nodes."""
        yield from self.incomplete
        for node in self.nodes.values():
            yield from node.problems

    def _make(self, name: str, table: Table, owner: str = "") -> Draft | None:
        use = table.items["use"]
        if not (isinstance(use, Leaf) and isinstance(use.value, str)):
            text = "`use` takes the name of a component, a string"
            self.incomplete.append(Problem("DL204", text, node=name, place=use.place))
            return None
        found = self.registry.find(use.value)
        if isinstance(found, Problem):
            self.incomplete.append(attrs.evolve(found, node=name, place=use.place))
            return None
        node = self.nodes[name] = Draft(name, table, found, owner)
        for module, install in found.traits.needs.items():
            if importlib.util.find_spec(module) is None:
                text = f"{use.value!r} needs the package {module!r}, which is not installed"
                node.fault("DL202", text, f"pip install '{install}'")
        self._settling.settle(node)
        return node
