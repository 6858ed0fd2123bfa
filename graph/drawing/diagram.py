"""Diagrams of a graph as data: boxes and arrows of the wiring, or the dataflow of a sequence."""

from collections.abc import Iterable, Iterator

import attrs

from drawloom.graph.problems import UserError
from drawloom.graph.wiring.graph import Graph
from drawloom.graph.wiring.node import Node


@attrs.frozen
class Box:
    """A node: its name and component."""

    name: str
    use: str

    @property
    def component_folder(self) -> str:
        """The first part of the component's name, which determines the colour of the box."""
        return self.use.partition(".")[0]


@attrs.frozen
class Arrow:
    """An arrow between two boxes. Its labels are fields or passed values."""

    source: str
    target: str
    labels: tuple[str, ...]

    @property
    def label(self) -> str:
        return ", ".join(self.labels)


@attrs.frozen
class Diagram:
    """Boxes in reading order, arrows, sequences with a fixed order, and the box in focus."""

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    sequences: tuple[tuple[str, ...], ...] = ()
    focus: str = ""

    @property
    def caption(self) -> str:
        """A line below the title: the numbers of nodes and arrows, and the meaning of an arrow."""
        numbers = {"node": len(self.boxes), "arrow": len(self.arrows)}
        counts = " and ".join(f"{count} {noun}{'' if count == 1 else 's'}" for noun, count in numbers.items())
        return f"{counts}; an arrow leads from a node to a node that it needs, in the colour of the latter"

    @property
    def component_folders(self) -> list[str]:
        """The boxes' component folders without duplicates, in order."""
        return list(dict.fromkeys(box.component_folder for box in self.boxes))


def make_boxes(graph: Graph, names: Iterable[str]) -> tuple[Box, ...]:
    """Return a box for every node name."""
    return tuple(Box(name, graph.nodes[name].spec.use) for name in names)


def make_wiring_diagram(graph: Graph, title: str, root: str, focus: str = "") -> Diagram:
    """Draw `root` and its dependencies or, with a `focus`, its dependencies and users. The graph must be acyclic."""
    users = graph.users(focus) if focus else []
    below = _list_node_and_dependencies(graph, focus or root)
    leads = [(user, focus) for user in users] + [(name, need) for name in below for need in graph.needs(name)]
    arrows = tuple(
        Arrow(source, target, tuple(key for key, edge in graph.nodes[source].edges.items() if target in edge.targets))
        for source, target in leads
    )
    return Diagram(
        title, make_boxes(graph, [*users, *below]), arrows, tuple(_list_sequence_targets(graph, below)), focus
    )


def _list_node_and_dependencies(graph: Graph, root: str) -> list[str]:
    """Return a node and all its dependencies, in depth-first order."""
    visited: dict[str, None] = {}
    stack = [root]
    while stack:
        name = stack.pop()
        if name not in visited:
            visited[name] = None
            stack += reversed(graph.needs(name))
    return list(visited)


def _list_sequence_targets(graph: Graph, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    for node in (graph.nodes[name] for name in names):
        yield from (edge.targets for field, edge in node.edges.items() if node.spec.fields[field].kind == "ordered")


@attrs.frozen
class ValueTrace:
    """A value of the dataflow. `access_by_member`: strongest access (writes, changes or reads) by member index."""

    value: str
    access_by_member: dict[int, str]

    @property
    def title(self) -> str:
        """The value, marked if no member writes it, as for an optional read."""
        return self.value if "writes" in self.access_by_member.values() else f"{self.value} (not written)"


@attrs.frozen
class SequenceDrawing:
    """The members of a sequence edge, and their values in order of first use."""

    title: str
    members: tuple[Box, ...]
    traces: tuple[ValueTrace, ...]

    def diagram(self) -> Diagram:
        """Draw an arrow from a member writing or changing a value to the members using this version."""
        values: dict[tuple[str, str], list[str]] = {}
        for trace in self.traces:
            last = ""
            for number, verb in trace.access_by_member.items():
                name = self.members[number].name
                if last and verb != "writes":
                    values.setdefault((last, name), []).append(trace.value)
                last = last if verb == "reads" else name
        arrows = tuple(Arrow(source, target, tuple(labels)) for (source, target), labels in values.items())
        return Diagram(self.title, self.members, arrows)


def _find_sequence_edges(node: Node) -> list[str]:
    """Return a node's non-empty sequence edges."""
    return [key for key, edge in node.edges.items() if node.spec.fields[key].kind == "ordered" and edge.targets]


def make_sequence_drawing(graph: Graph, title: str, name: str) -> SequenceDrawing:
    """Return the dataflow in a node's sequence edge. Raises UserError if the node has none."""
    node = graph.nodes[name]
    fields = _find_sequence_edges(node)
    if not fields:
        choices = [other for other, node in graph.nodes.items() if _find_sequence_edges(node)]
        hint = f"; choose {' or '.join(f'[{choice}]' for choice in choices)} with --focus" if choices else ""
        raise UserError(f"[{name}] has no sequence edge{hint}", 2)
    targets = node.edges[fields[0]].targets
    return SequenceDrawing(f"{title}: [{name}] {fields[0]}", make_boxes(graph, targets), _trace_values(graph, targets))


def _trace_values(graph: Graph, members: tuple[str, ...]) -> tuple[ValueTrace, ...]:
    access_by_member: dict[str, dict[int, str]] = {}
    for number, name in enumerate(members):
        flow = graph.nodes[name].spec.traits.flow
        for verb, values in (("reads", flow.reads), ("changes", flow.changes), ("writes", flow.writes)):
            for value in values:
                access_by_member.setdefault(value.removesuffix("?"), {})[number] = verb
    return tuple(ValueTrace(value, members) for value, members in access_by_member.items())
