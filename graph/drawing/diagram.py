"""Diagrams of a graph as data: boxes and arrows of the wiring, or the dataflow of a sequence."""

from collections.abc import Iterable, Iterator

import attrs

from drawloom.graph.problems import UserError
from drawloom.graph.wiring.graph import Graph
from drawloom.graph.wiring.node import Node


@attrs.frozen
class Box:
    """A node: its name, and the component that it uses."""

    name: str
    use: str

    @property
    def subject(self) -> str:
        """The first part of the component's name, which gives the box its colour."""
        return self.use.partition(".")[0]


@attrs.frozen
class Arrow:
    """An arrow between two boxes; its labels are fields, or values that are passed on."""

    source: str
    target: str
    labels: tuple[str, ...]

    @property
    def label(self) -> str:
        return ", ".join(self.labels)


@attrs.frozen
class Diagram:
    """Boxes in reading order, arrows, sequences that keep their order, and the box that the diagram is about."""

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    sequences: tuple[tuple[str, ...], ...] = ()
    focus: str = ""

    @property
    def caption(self) -> str:
        """A line below the title: how many nodes and arrows, and what an arrow means."""
        counted = " and ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in self._counts())
        return f"{counted}; an arrow leads from a node to what it needs, in the colour of that"

    def _counts(self) -> tuple[tuple[int, str], tuple[int, str]]:
        return (len(self.boxes), "node"), (len(self.arrows), "arrow")

    @property
    def subjects(self) -> list[str]:
        """The subjects of the boxes, each once, in order."""
        return list(dict.fromkeys(box.subject for box in self.boxes))


def boxes(graph: Graph, names: Iterable[str]) -> tuple[Box, ...]:
    """A box for each of these nodes."""
    return tuple(Box(name, graph.nodes[name].spec.use) for name in names)


def wiring(graph: Graph, title: str, root: str, focus: str = "") -> Diagram:
    """Everything that `root` needs; with a `focus`, what it needs and its users. The graph must be acyclic."""
    users = graph.users(focus) if focus else []
    below = _walk(graph, focus or root)
    leads = [(user, focus) for user in users] + [(name, need) for name in below for need in graph.needs(name)]
    arrows = tuple(Arrow(source, target, _fields(graph, source, target)) for source, target in leads)
    return Diagram(title, boxes(graph, [*users, *below]), arrows, tuple(_sequences(graph, below)), focus)


def _walk(graph: Graph, root: str) -> list[str]:
    """A node and everything that it needs, in depth-first order of the edges."""
    found: dict[str, None] = {}
    stack = [root]
    while stack:
        name = stack.pop()
        if name not in found:
            found[name] = None
            stack += reversed(graph.needs(name))
    return list(found)


def _sequences(graph: Graph, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    for node in (graph.nodes[name] for name in names):
        yield from (edge.targets for field, edge in node.edges.items() if node.spec.fields[field].kind == "ordered")


def _fields(graph: Graph, source: str, target: str) -> tuple[str, ...]:
    return tuple(field for field, edge in graph.nodes[source].edges.items() if target in edge.targets)


@attrs.frozen
class Thread:
    """A value of the dataflow. `touches`: member index to writes, changes or reads, the strongest of them."""

    value: str
    touches: dict[int, str]

    @property
    def written(self) -> bool:
        """Whether some member writes it; an optional read may have no writer."""
        return "writes" in self.touches.values()

    @property
    def title(self) -> str:
        return self.value if self.written else f"{self.value} (not written)"


@attrs.frozen
class SequenceDrawing:
    """The members of a sequence edge, and their values in order of first use."""

    title: str
    members: tuple[Box, ...]
    threads: tuple[Thread, ...]

    def diagram(self) -> Diagram:
        """An arrow from each member to those that read or change what it wrote or changed last."""
        values: dict[tuple[str, str], list[str]] = {}
        for thread in self.threads:
            last = ""
            for number, verb in thread.touches.items():
                name = self.members[number].name
                if last and verb != "writes":
                    values.setdefault((last, name), []).append(thread.value)
                last = last if verb == "reads" else name
        arrows = tuple(Arrow(source, target, tuple(labels)) for (source, target), labels in values.items())
        return Diagram(self.title, self.members, arrows)


def _sequence_edges(node: Node) -> list[str]:
    """The sequence edges of a node that have members."""
    return [key for key, edge in node.edges.items() if node.spec.fields[key].kind == "ordered" and edge.targets]


def step_of(graph: Graph, title: str, name: str) -> SequenceDrawing:
    """The dataflow of a node's sequence edge; UserError if it has none."""
    node = graph.nodes[name]
    fields = _sequence_edges(node)
    if not fields:
        having = [each.name for each in graph.nodes.values() if _sequence_edges(each)]
        hint = f"; name {' or '.join(f'[{each}]' for each in having)} by --focus" if having else ""
        raise UserError(f"[{name}] has no sequence edge{hint}", 2)
    targets = node.edges[fields[0]].targets
    return SequenceDrawing(f"{title}: [{name}] {fields[0]}", boxes(graph, targets), _threads(graph, targets))


def _threads(graph: Graph, members: tuple[str, ...]) -> tuple[Thread, ...]:
    touches: dict[str, dict[int, str]] = {}
    for number, name in enumerate(members):
        flow = graph.nodes[name].spec.traits.flow
        for verb, values in (("reads", flow.reads), ("changes", flow.changes), ("writes", flow.writes)):
            for value in values:
                touches.setdefault(value.removesuffix("?"), {})[number] = verb
    return tuple(Thread(value, members) for value, members in touches.items())
