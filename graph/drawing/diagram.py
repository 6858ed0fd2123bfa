"""What there is to draw of a graph: boxes, and the arrows between them."""

from collections.abc import Iterable, Iterator

import attrs

from drawloom.graph.build.graph import Graph


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
    """One node leads to another, by one or more labels: fields, or values that are handed on."""

    source: str
    target: str
    labels: tuple[str, ...]

    @property
    def label(self) -> str:
        return ", ".join(self.labels)


@attrs.frozen
class Diagram:
    """Boxes in reading order, arrows, sequences that keep their order, and the box that the picture is about."""

    title: str
    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    sequences: tuple[tuple[str, ...], ...] = ()
    focus: str = ""

    @property
    def caption(self) -> str:
        """What is to be seen."""
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
    """Everything that `root` needs; with a `focus`, all that it needs and who uses it. The graph has no circle."""
    users = graph.users(focus) if focus else []
    below = _walk(graph, focus or root)
    leads = [(user, focus) for user in users] + [(name, need) for name in below for need in graph.needs(name)]
    arrows = tuple(Arrow(source, target, _fields(graph, source, target)) for source, target in leads)
    return Diagram(title, boxes(graph, [*users, *below]), arrows, tuple(_sequences(graph, below)), focus)


def _walk(graph: Graph, root: str) -> list[str]:
    """What a node needs, itself first, each node before what it needs alone, in the order of the edges."""
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
