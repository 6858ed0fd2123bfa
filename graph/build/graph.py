"""The graph of a recipe: checked nodes and edges, their order, and what one of them needs."""

from collections.abc import Container, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from drawloom.graph.build.builder import GraphBuilder
from drawloom.graph.build.dataflow import check_sequence
from drawloom.graph.build.names import check_names
from drawloom.graph.build.node import Node, NodeView
from drawloom.graph.problems import Place, Problem, RecipeError, in_order
from drawloom.graph.recipe.recipe import Recipe
from drawloom.graph.registry.registry import Registry
from drawloom.graph.types.port_match import implements


@attrs.frozen(eq=False)
class Graph:
    """Nodes by name, and all that is wrong with them. It does not change: other values make another graph."""

    recipe: Recipe
    registry: Registry
    nodes: Mapping[str, Node]
    root: str = ""
    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe, catalogue: Registry, root: str = "") -> "Graph":
        """Wire and check a whole recipe. Nodes that `root` does not need are warnings, if it is given."""
        wiring = GraphBuilder(recipe, catalogue)
        wiring.run()
        nodes = MappingProxyType({name: draft.finished() for name, draft in wiring.nodes.items()})
        graph = cls(recipe, catalogue, nodes, root)
        problems = [*recipe.problems, *wiring.problems(), *graph._check()]
        problems += graph._check_root(all(problem.warning for problem in problems)) if root else ()
        return attrs.evolve(graph, problems=tuple(in_order(problems)))

    def with_values(self, data: Mapping[str, Any], source: str = "override") -> "Graph":
        """Another graph: of the same recipe with values laid over it."""
        return Graph.of(self.recipe.with_values(data, source), self.registry, self.root)

    @property
    def faults(self) -> list[Problem]:
        """The problems that are no mere warnings."""
        return [problem for problem in self.problems if not problem.warning]

    def or_error(self) -> "Graph":
        """This graph, or a RecipeError with all its faults."""
        if self.faults:
            raise RecipeError(self.faults)
        return self

    def view(self, name: str) -> NodeView:
        """What a component's constraints see of a node."""
        return NodeView(self.nodes[name], self.nodes)

    def needs(self, name: str) -> tuple[str, ...]:
        """The nodes that one node's edges lead to, each once, in order."""
        return self.nodes[name].needs

    def users(self, name: str) -> list[str]:
        """The nodes whose edges lead to one node."""
        return [other for other in self.nodes if name in self.needs(other)]

    def incoming(self, name: str) -> list[tuple[str, list[str]]]:
        """The nodes that lead to one node, each with the edges by which it does."""
        by = {
            user: [key for key, edge in node.edges.items() if name in edge.targets] for user, node in self.nodes.items()
        }
        return [(user, keys) for user, keys in by.items() if keys]

    def provides(self, name: str) -> set[type]:
        """The ports whose promises a node's component keeps, of those that some node asks for."""
        fields = (field for node in self.nodes.values() for field in node.spec.fields.values())
        ports = {port for field in fields for port in field.ports}
        return {port for port in ports if implements(self.nodes[name].spec.cls, port)}

    def implementers(self, port: type) -> list[str]:
        """The nodes whose components keep the promises of a port."""
        return [name for name, node in self.nodes.items() if implements(node.spec.cls, port)]

    def topological_order(self, roots: Iterable[str], without: Container[str] = ()) -> list[str]:
        """
        The nodes that these need, themselves included, each behind all that it needs.

        What is needed only by nodes `without` needs of their own is left out.
        """
        order: dict[str, None] = {}
        stack = [(name, False) for name in reversed(list(roots))]
        while stack:
            name, ready = stack.pop()
            if ready:
                order[name] = None
            elif name not in order:
                stack.append((name, True))
                needs = () if name in without else self.needs(name)
                stack += [(need, False) for need in reversed(needs) if need not in order]
        return list(order)

    def find_cycle(self) -> list[str]:
        """Nodes that need one another in a circle, the first again at the end; empty if there is none."""
        done: set[str] = set()
        for start in self.nodes:
            trail: dict[str, Iterator[str]] = {}
            name: str | None = start
            while name is not None and name not in done:
                if name in trail:
                    names = list(trail)
                    return [*names[names.index(name) :], name]
                trail[name] = iter(self.needs(name))
                name = self._next(trail, done)
        return []

    def _next(self, trail: dict[str, Iterator[str]], done: set[str]) -> str | None:
        """The next node of a depth-first walk, leaving those whose needs are all done."""
        while trail:
            last = next(reversed(trail))
            for need in trail[last]:
                if need not in done:
                    return need
            done.add(last)
            del trail[last]
        return None

    def _check(self) -> Iterator[Problem]:
        circle = self.find_cycle()
        if circle:
            text = "nodes need one another in a circle: " + " -> ".join(circle)
            yield Problem("DL320", text, "cut one of these edges", circle[0], self._place_of_edge(*circle[:2]))
        for node in self.nodes.values():
            for name, edge in node.edges.items():
                if node.spec.fields[name].kind == "ordered":
                    yield from check_sequence(node, name, edge, self.nodes)
            if not self._near_fault(node):
                yield from _constraints(node, self.view(node.name))
        yield from check_names(self.nodes)

    def _place_of_edge(self, name: str, target: str) -> Place:
        """Where one node refers to another."""
        node = self.nodes[name]
        found = (dict(zip(edge.targets, edge.items, strict=False)).get(target) for edge in node.edges.values())
        return node.place_of(next((path for path in found if path), ()))

    def _near_fault(self, node: Node) -> bool:
        """Whether a node or a neighbour is at fault already, or could not be made: constraints could not be trusted."""
        missing = any(
            field.is_edge and field.name not in node.edges and (field.required or field.name in node.table.items)
            for field in node.spec.fields.values()
        )
        unmade = any(edge.incomplete for edge in node.edges.values())
        return missing or unmade or node.invalid or any(self.nodes[name].invalid for name in self.needs(node.name))

    def _check_root(self, complete: bool) -> Iterator[Problem]:
        if self.root not in self.recipe.nodes:
            text, place = f"there is no node [{self.root}], so there is nothing to run", Place(self.recipe.source)
            yield Problem("DL321", text, f"write [{self.root}]", place=place)
        elif complete:  # else what is needed can't be told yet
            needed = set(self.topological_order([self.root]))
            for name, node in self.nodes.items():
                if name not in needed and not node.owner:
                    text = f"nothing that [{self.root}] needs leads to this node, so it will not be built"
                    yield Problem("DL322", text, "", name, node.place, warning=True)


def _constraints(node: Node, view: NodeView) -> Iterator[Problem]:
    constraints = getattr(view.component, "constraints", None)
    try:
        yield from constraints(view) if constraints else ()
    except Exception as error:
        text = f"the constraints of {view.use!r} can't be checked: {type(error).__name__}: {error}"
        yield Problem("DL206", text, "tell its author", node.name, node.place)
