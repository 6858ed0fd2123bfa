"""Nodes and edges: what a checked recipe becomes before anything is built."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from drawloom.graph.problems import Place, Problem
from drawloom.graph.recipe.layers import Path, Table, locate
from drawloom.graph.registry.spec import Spec


@attrs.frozen
class Edge:
    """
    Where one field of a node leads: node names, in order. `keys` names them in a mapping, `items` says where each is
    written, `unmade` that there would be more if all nodes could be made.
    """

    targets: tuple[str, ...]
    keys: tuple[str, ...] = ()
    items: tuple[Path, ...] = ()
    written: bool = True
    incomplete: bool = False


class _Placed:
    """What has a table in a recipe, and so a place."""

    table: Table

    @property
    def place(self) -> Place:
        """Where the node says what it is."""
        return self.table.use.place if self.table.use else self.table.place

    def place_of(self, path: Path, *, key: bool = False) -> Place:
        """Where a setting or edge, or a part of one, stands; the node's own place if it is not written."""
        if path and path[0] in self.table.items:
            return locate(self.table, path, key=key)
        return self.place


@attrs.frozen(eq=False)
class Node(_Placed):
    """One table with `use`: its component, its settings as values, and its edges. `owner` if it stands in place."""

    name: str
    table: Table
    spec: Spec
    settings: Mapping[str, Any]
    edges: Mapping[str, Edge]
    owner: str = ""
    problems: tuple[Problem, ...] = ()
    needs: tuple[str, ...] = attrs.field(init=False)
    """The nodes that its edges lead to, each once, in order."""

    @needs.default
    def _needs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(target for edge in self.edges.values() for target in edge.targets))

    @property
    def invalid(self) -> bool:
        """Whether anything is wrong with the node itself."""
        return bool(self.problems) and not all(problem.warning for problem in self.problems)


@attrs.define(eq=False)
class Draft(_Placed):
    """A node while it is settled and connected."""

    name: str
    table: Table
    spec: Spec
    owner: str = ""
    settings: dict[str, Any] = attrs.field(factory=dict)
    edges: dict[str, Edge] = attrs.field(factory=dict)
    problems: list[Problem] = attrs.field(factory=list)

    def fault(
        self, code: str, text: str, hint: str = "", path: Path = (), *, key: bool = False, place: Place | None = None
    ) -> None:
        """Keep a problem with a setting or edge of this node, or with the node itself."""
        self.problems.append(Problem(code, text, hint, self.name, place or self.place_of(path, key=key)))

    def fails(self, what: str, error: Exception) -> None:
        """Keep a problem that is the component's own fault."""
        self.fault("DL206", f"{self.spec.use!r}: {what}: {type(error).__name__}: {error}", "tell its author")

    def finished(self) -> Node:
        """The node that has come of it, which does not change any more."""
        settings, edges = MappingProxyType(self.settings), MappingProxyType(self.edges)
        return Node(self.name, self.table, self.spec, settings, edges, self.owner, tuple(self.problems))


@attrs.frozen
class NodeView:
    """What a component's `constraints` see: settings, and views of the neighbours. No objects."""

    _node: Node
    _nodes: Mapping[str, Node]

    @property
    def name(self) -> str:
        return self._node.name

    @property
    def use(self) -> str:
        return self._node.spec.use

    @property
    def component(self) -> type:
        return self._node.spec.cls

    @property
    def settings(self) -> Mapping[str, Any]:
        """Setting to value, defaults filled in."""
        return self._node.settings

    def neighbours(self, edge: str) -> "list[NodeView]":
        """The nodes that an edge leads to, in order."""
        found = self._node.edges.get(edge)
        return [NodeView(self._nodes[name], self._nodes) for name in found.targets] if found else []

    def fault(self, key: str | Path, text: str, hint: str = "") -> Problem:
        """A problem with one of this node's settings or edges, or with a part of it: ("phases", 2, "to")."""
        path = (key,) if isinstance(key, str) else key
        return Problem("DL401", text, hint, self._node.name, self._node.place_of(path))

    def warning(self, key: str | Path, text: str, hint: str = "") -> Problem:
        """Something that is allowed, but hardly meant."""
        return attrs.evolve(self.fault(key, text, hint), code="DL402", warning=True)


def dotted(path: Path) -> str:
    """A path inside a node as people write it: members[2].every."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
