"""Nodes and edges: the tables of a recipe before anything is built."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs

from drawloom.graph.problems import KeyPath, Position, Problem
from drawloom.graph.recipe.layers import Table, locate_part
from drawloom.graph.registry.registry import Spec
from drawloom.graph.types.port_match import implements


class Edge(NamedTuple):
    """
    Names of the target nodes of a node's field, in order.

    `keys` are their keys in a mapping, `items` the paths where they are written. `written` is false if the edge was
    found by type. `incomplete` is true if some members are not nodes, because these members have problems.
    """

    targets: tuple[str, ...]
    keys: tuple[str, ...] = ()
    items: tuple[KeyPath, ...] = ()
    written: bool = True
    incomplete: bool = False


@attrs.define(eq=False)
class Node:
    """
    A table with `use`: its component, converted settings, edges and problems.

    For an inline node without its own table, `owner` names the enclosing node. Only the builder adds settings, edges
    and problems; all other code reads them.
    """

    name: str
    table: Table
    spec: Spec
    owner: str = ""
    problems: list[Problem] = attrs.field(factory=list, init=False)
    _settings: dict[str, Any] = attrs.field(factory=dict, init=False)
    _recorded: dict[str, Any] = attrs.field(factory=dict, init=False)
    _edges: dict[str, Edge] = attrs.field(factory=dict, init=False)
    needs: tuple[str, ...] = attrs.field(default=(), init=False)
    """Names of its edges' target nodes, in order and without duplicates."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Values by setting with defaults filled in, without invalid settings."""
        return MappingProxyType(self._settings)

    @property
    def settings_as_written(self) -> Mapping[str, Any]:
        """The settings for a lock file: its relative paths stay as written."""
        return MappingProxyType(self._settings | self._recorded) if self._recorded else self.settings

    @property
    def edges(self) -> Mapping[str, Edge]:
        """Edges by field, without invalid edges and edges left out."""
        return MappingProxyType(self._edges)

    @property
    def is_invalid(self) -> bool:
        """Whether the node itself has a problem other than a warning."""
        return bool(self.problems) and any(not problem.warning for problem in self.problems)

    @property
    def position(self) -> Position:
        """The position of its `use`."""
        return self.table.use.position if self.table.use else self.table.position

    def position_of(self, path: KeyPath, *, key: bool = False) -> Position:
        """Return the position of a setting, an edge or a part of one. Default: the node's position."""
        if path and path[0] in self.table.items:
            return locate_part(self.table, path, key=key)
        return self.position

    def set_setting(self, key: str, value: Any, recorded: Any = None) -> None:
        """Set a setting's converted value, and its value for a lock file if it is another one."""
        self._settings[key] = value
        if recorded is not None:
            self._recorded[key] = recorded

    def set_edge(self, key: str, edge: Edge) -> None:
        """Add an edge, and its targets to the needs."""
        self._edges[key] = edge
        first = key == self.spec.traits.opens_first
        needs = (*edge.targets, *self.needs) if first else (*self.needs, *edge.targets)
        self.needs = tuple(dict.fromkeys(needs)) if needs[1:] else needs

    def add_problem(
        self,
        code: str,
        text: str,
        hint: str = "",
        path: KeyPath = (),
        *,
        key: bool = False,
        position: Position | None = None,
    ) -> None:
        """Add a problem with a setting, an edge, or the node itself."""
        self.problems.append(Problem(code, text, hint, self.name, position or self.position_of(path, key=key)))

    def add_component_bug(self, failure: str, error: Exception) -> None:
        """Add a problem for an exception in the component's code, which its author must fix."""
        self.add_problem(
            "DL206",
            f"{self.spec.use!r}: {failure}: {type(error).__name__}: {error}",
            "report it to the author of the component",
        )


@attrs.frozen
class NodeView:
    """
    Argument of a component's `constraints`: settings, and views of the neighbours, but no built objects.

    `nodes` are all nodes of the graph, by name.
    """

    _node: Node
    nodes: Mapping[str, Node]

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
            names = ", ".join(node.name for node in nodes)
            raise ValueError(
                f"the edge {edge!r} leads to {len(nodes)} nodes: {names}; call neighbours({edge!r}) to get a list"
            )
        return nodes[0] if nodes else None

    def neighbours(self, edge: str) -> "list[NodeView]":
        """Return an edge's target nodes, in order."""
        targets = self._node.edges.get(edge)
        return [NodeView(self.nodes[name], self.nodes) for name in targets.targets] if targets else []

    def reachable(self) -> "Iterator[NodeView]":
        """Yield this node and all nodes that its edges lead to, directly or through others, each once."""
        waiting, seen = [self._node.name], {self._node.name}
        while waiting:
            node = self.nodes[waiting.pop(0)]
            yield NodeView(node, self.nodes)
            waiting += [name for name in node.needs if name not in seen]
            seen |= {*node.needs}

    def edge_keys(self, edge: str) -> list[str]:
        """Return the keys of a mapping edge, in order."""
        found = self._node.edges.get(edge)
        return [*found.keys] if found else []

    def problem(self, key: str | KeyPath, text: str, hint: str = "") -> Problem:
        """Make a problem with a setting or edge, or with a part of one: ("phases", 2, "to")."""
        path = (key,) if isinstance(key, str) else key
        return Problem("DL401", text, hint, self._node.name, self._node.position_of(path))

    def warning(self, key: str | KeyPath, text: str, hint: str = "") -> Problem:
        """Make a warning about an allowed value that is probably a mistake."""
        return attrs.evolve(self.problem(key, text, hint), code="DL402", warning=True)


def format_path(path: KeyPath) -> str:
    """Return a path inside a node as users write it: members[2].every."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
