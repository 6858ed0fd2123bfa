"""Nodes and edges: what the tables of a recipe become before anything is built."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs

from drawloom.graph.problems import KeyPath, Place, Problem
from drawloom.graph.recipe.layers import Table, locate
from drawloom.graph.registry.spec import Spec
from drawloom.graph.types.port_match import implements


class Edge(NamedTuple):
    """
    The nodes that one field of a node leads to, by name and in order.

    `keys` are their keys in a mapping, `items` where each is written. `written` is false if the edge was found by
    type. `incomplete` says that some members could not become nodes, because they have problems themselves.
    """

    targets: tuple[str, ...]
    keys: tuple[str, ...] = ()
    items: tuple[KeyPath, ...] = ()
    written: bool = True
    incomplete: bool = False


@attrs.define(eq=False)
class Node:
    """
    One table with `use`: its component, its settings as values, its edges, and its problems.

    `owner` is the node in which it is written inline, if it has no table of its own. The builder adds settings, edges
    and problems; everything else sees them read-only.
    """

    name: str
    table: Table
    spec: Spec
    owner: str = ""
    problems: list[Problem] = attrs.field(factory=list, init=False)
    _settings: dict[str, Any] = attrs.field(factory=dict, init=False)
    _edges: dict[str, Edge] = attrs.field(factory=dict, init=False)
    needs: tuple[str, ...] = attrs.field(default=(), init=False)
    """The nodes that its edges lead to, in order and without duplicates."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Values by setting, with defaults filled in; without those that have problems."""
        return MappingProxyType(self._settings)

    @property
    def edges(self) -> Mapping[str, Edge]:
        """Edges by field, without those that have problems or are left out."""
        return MappingProxyType(self._edges)

    @property
    def invalid(self) -> bool:
        """Whether the node itself has a problem that is not a mere warning."""
        return bool(self.problems) and any(not problem.warning for problem in self.problems)

    @property
    def place(self) -> Place:
        """The position of its `use`."""
        return self.table.use.place if self.table.use else self.table.place

    def place_of(self, path: KeyPath, *, key: bool = False) -> Place:
        """The position of a setting or edge, or of a part of one; that of the node if it is not written."""
        if path and path[0] in self.table.items:
            return locate(self.table, path, key=key)
        return self.place

    def set(self, key: str, value: Any) -> None:
        """Set the value of a setting."""
        self._settings[key] = value

    def connect(self, key: str, edge: Edge) -> None:
        """Set an edge."""
        self._edges[key] = edge
        first = key == self.spec.traits.opens_first
        needs = (*edge.targets, *self.needs) if first else (*self.needs, *edge.targets)
        self.needs = tuple(dict.fromkeys(needs)) if needs[1:] else needs

    def add_problem(
        self, code: str, text: str, hint: str = "", path: KeyPath = (), *, key: bool = False, place: Place | None = None
    ) -> None:
        """Add a problem with a setting or edge of this node, or with the node itself."""
        self.problems.append(Problem(code, text, hint, self.name, place or self.place_of(path, key=key)))

    def add_bug(self, what: str, error: Exception) -> None:
        """Add a problem that the author of the component has to fix, and not the author of the recipe."""
        self.add_problem(
            "DL206",
            f"{self.spec.use!r}: {what}: {type(error).__name__}: {error}",
            "report it to the author of the component",
        )


@attrs.frozen
class NodeView:
    """The argument of a component's `constraints`: settings, and views of the neighbours, but no built objects."""

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

    def implements(self, port: type) -> bool:
        """Return whether the component implements a port, or has an optional capability; fields count as members."""
        return implements(self.component, port)

    @property
    def settings(self) -> Mapping[str, Any]:
        """Values by setting, with defaults filled in."""
        return self._node.settings

    def neighbour(self, edge: str) -> "NodeView | None":
        """Return the node that an edge leads to; None if the edge is left out. ValueError if it leads to several."""
        nodes = self.neighbours(edge)
        if len(nodes) > 1:
            raise ValueError(f"{edge!r} leads to {len(nodes)} nodes: {', '.join(node.name for node in nodes)}")
        return nodes[0] if nodes else None

    def neighbours(self, edge: str) -> "list[NodeView]":
        """The nodes that an edge leads to, in order."""
        found = self._node.edges.get(edge)
        return [NodeView(self._nodes[name], self._nodes) for name in found.targets] if found else []

    def keys(self, edge: str) -> list[str]:
        """The keys of an edge that is a mapping, in order."""
        found = self._node.edges.get(edge)
        return [*found.keys] if found else []

    def problem(self, key: str | KeyPath, text: str, hint: str = "") -> Problem:
        """A problem with one of this node's settings or edges, or with a part of it: ("phases", 2, "to")."""
        path = (key,) if isinstance(key, str) else key
        return Problem("DL401", text, hint, self._node.name, self._node.place_of(path))

    def warning(self, key: str | KeyPath, text: str, hint: str = "") -> Problem:
        """A warning: something that is allowed, but probably a mistake."""
        return attrs.evolve(self.problem(key, text, hint), code="DL402", warning=True)


def dotted(path: KeyPath) -> str:
    """A path inside a node as people write it: members[2].every."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
