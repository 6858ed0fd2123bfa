"""One walk through a sequence: its members in order, and the values that pass from one to another like threads."""

import attrs

from drawloom.graph.build.graph import Graph
from drawloom.graph.drawing.diagram import Arrow, Box, Diagram, boxes
from drawloom.graph.problems import UserError


@attrs.frozen
class Thread:
    """A value, and the most that each member does to it (it writes, changes or reads it), by the member's number."""

    value: str
    touches: dict[int, str]

    @property
    def written(self) -> bool:
        """Whether some member writes it; else it is one of those that need not be written."""
        return "writes" in self.touches.values()

    @property
    def title(self) -> str:
        return self.value if self.written else f"{self.value} (not written)"


@attrs.frozen
class Step:
    """The members of a sequence edge, and their threads in the order in which they begin."""

    title: str
    members: tuple[Box, ...]
    threads: tuple[Thread, ...]

    def picture(self) -> Diagram:
        """An arrow from each member to those that take what it has written or changed."""
        values: dict[tuple[str, str], list[str]] = {}
        for thread in self.threads:
            last = ""
            for number, verb in thread.touches.items():
                name = self.members[number].name
                if last and verb != "writes":
                    values.setdefault((last, name), []).append(thread.value)
                last = last if verb == "reads" else name
        arrows = tuple(Arrow(*ends, tuple(labels)) for ends, labels in values.items())
        return Diagram(self.title, self.members, arrows)


def step_of(graph: Graph, title: str, name: str) -> Step:
    """The walk through a node's sequence edge; a UserError if it has none."""
    node = graph.nodes[name]
    fields = [field for field in node.edges if node.spec.fields[field].kind == "ordered" and node.edges[field].targets]
    if not fields:
        raise UserError(f"[{name}] leads through no sequence of members; name a node that does by --focus", 2)
    targets = node.edges[fields[0]].targets
    return Step(f"{title}: [{name}] {fields[0]}", boxes(graph, targets), _threads(graph, targets))


def _threads(graph: Graph, members: tuple[str, ...]) -> tuple[Thread, ...]:
    touches: dict[str, dict[int, str]] = {}
    for number, name in enumerate(members):
        flow = graph.nodes[name].spec.traits.flow
        for verb, values in (("reads", flow.reads), ("changes", flow.changes), ("writes", flow.writes)):
            for value in values:
                touches.setdefault(value.removesuffix("?"), {})[number] = verb
    return tuple(Thread(value, members) for value, members in touches.items())
