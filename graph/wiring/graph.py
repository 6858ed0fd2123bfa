"""The graph of a recipe: nodes and edges, their order, and the checks of the graph as a whole."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import attrs

from drawloom.graph.component import Flow
from drawloom.graph.garbage import paused_collection
from drawloom.graph.problems import Place, Problem, RecipeError, in_order
from drawloom.graph.recipe.layers import Layer, leaves
from drawloom.graph.recipe.merged import MergedRecipe
from drawloom.graph.registry.registry import Registry
from drawloom.graph.types.port_match import implements
from drawloom.graph.wiring.builder import GraphBuilder
from drawloom.graph.wiring.node import Edge, Node, NodeView

NO_ROOT = "DL321"


@attrs.frozen(eq=False, slots=False)
class Graph:
    """Nodes by name, and all problems of the recipe. Immutable: other values make another graph."""

    recipe: MergedRecipe
    registry: Registry
    nodes: Mapping[str, Node]
    root: str = ""
    problems: tuple[Problem, ...] = ()
    _orders: dict[tuple[str, ...], list[str]] = attrs.field(factory=dict)
    """Topological orders by roots: a check and the container ask for the same."""

    @classmethod
    @paused_collection()
    def of(cls, recipe: MergedRecipe, registry: Registry, root: str = "") -> "Graph":
        """Build and check the graph of a recipe. If `root` is given, nodes that it does not need are warnings."""
        builder = GraphBuilder(recipe, registry)
        builder.run()
        graph = cls(recipe, registry, MappingProxyType(builder.nodes), root)
        problems = [*recipe.problems, *builder.problems(), *graph._check()]
        problems += graph._check_root(all(problem.warning for problem in problems)) if root else ()
        return attrs.evolve(graph, problems=tuple(in_order(problems)))

    def with_values(self, data: Mapping[str, Any], source: str = "override") -> "Graph":
        """The graph of the same recipe with other values merged over it."""
        return Graph.of(self.recipe.with_values(data, source), self.registry, self.root)

    @property
    def errors(self) -> list[Problem]:
        """The problems that are more than warnings."""
        return [problem for problem in self.problems if not problem.warning]

    def or_error(self) -> "Graph":
        """This graph. Raises RecipeError with all its errors, if it has any."""
        if errors := self.errors:
            raise RecipeError(errors)
        return self

    def view(self, name: str) -> NodeView:
        """The view of a node that its component's constraints get."""
        return NodeView(self.nodes[name], self.nodes)

    def needs(self, name: str) -> tuple[str, ...]:
        """The nodes that one node's edges lead to, in order and without duplicates."""
        return self.nodes[name].needs

    def users(self, name: str) -> list[str]:
        """The nodes whose edges lead to one node."""
        return [other for other in self.nodes if name in self.needs(other)]

    def incoming(self, name: str) -> list[tuple[str, list[str]]]:
        """The nodes that use one node, each with the names of the edges that lead to it."""
        by = {
            user: [key for key, edge in node.edges.items() if name in edge.targets] for user, node in self.nodes.items()
        }
        return [(user, keys) for user, keys in by.items() if keys]

    def provides(self, name: str) -> set[type]:
        """The ports that a node's component implements, of those that some node has edges to."""
        fields = (field for node in self.nodes.values() for field in node.spec.fields.values())
        ports = {port for field in fields for port in field.ports}
        return {port for port in ports if implements(self.nodes[name].spec.cls, port)}

    def implementers(self, port: type) -> list[str]:
        """The nodes whose components implement a port."""
        return [name for name, node in self.nodes.items() if implements(node.spec.cls, port)]

    def topological_order(self, roots: Iterable[str], without: Container[str] = ()) -> list[str]:
        """
        The nodes that `roots` need directly or indirectly, and the roots: each after everything that it needs.

        Nodes in `without` are included, but not what they need. In a dependency cycle, some node comes before what it
        needs.
        """
        asked = tuple(roots)
        if without:
            return self._order(asked, without)
        if asked not in self._orders:
            self._orders[asked] = self._order(asked, without)
        return list(self._orders[asked])

    def _order(self, roots: Sequence[str], without: Container[str]) -> list[str]:
        # Depth-first with an explicit stack: a chain of nodes may be longer than Python's recursion limit.
        order: dict[str, None] = {}
        entered: set[str] = set()
        stack = [*reversed(roots)]
        while stack:
            name = stack[-1]
            if name in entered:  # all that it needs is behind
                order[stack.pop()] = None
            else:
                entered.add(name)
                if name not in without:
                    stack += [need for need in reversed(self.nodes[name].needs) if need not in entered]
        return list(order)

    def valid_nodes(self, roots: Iterable[str]) -> list[str]:
        """Return the nodes that `roots` need, in topological order, without those that need a node with an error."""
        faulty = {problem.node for problem in self.errors}
        valid: dict[str, None] = {}
        for name in self.topological_order(roots):
            node = self.nodes[name]
            if name not in faulty and self.is_complete(node) and all(need in valid for need in node.needs):
                valid[name] = None
        return list(valid)

    def restricted_to(self, roots: Iterable[str]) -> "Graph":
        """The graph of what `roots` need, with the problems of these nodes only: others need not even be known."""
        nodes = {name: self.nodes[name] for name in self.topological_order(roots)}
        # An edge may be missing because the table that it leads to could not become a node.
        broken = not all(self.is_complete(node) for node in nodes.values())
        problems = tuple(
            p for p in self.problems if p.node in nodes or (broken and p.node not in self.nodes and p.code != NO_ROOT)
        )
        return attrs.evolve(self, nodes=MappingProxyType(nodes), problems=problems, orders={})

    def find_cycle(self) -> list[str]:
        """A dependency cycle, with its first node repeated at the end; empty if there is none."""
        if self._is_acyclic():
            return []
        done: set[str] = set()
        for start in self.nodes:
            # The path from `start` in order, each node with its unvisited needs; not recursive, as a chain may be long.
            trail: dict[str, Iterator[str]] = {}
            name: str | None = start
            while name is not None and name not in done:
                if name in trail:
                    names = list(trail)
                    return [*names[names.index(name) :], name]
                trail[name] = iter(self.needs(name))
                name = self._next(trail, done)
        return []

    def _is_acyclic(self) -> bool:
        order = self.topological_order([self.root]) if self.root in self.nodes else []
        if len(order) < len(self.nodes):
            order = self.topological_order(self.nodes)
        behind: set[str] = set()
        for name in order:
            if not behind.issuperset(self.nodes[name].needs):
                return False
            behind.add(name)
        return True

    def _next(self, trail: dict[str, Iterator[str]], done: set[str]) -> str | None:
        """The next node of a depth-first walk, after leaving the nodes whose needs are done."""
        while trail:
            last = next(reversed(trail))
            for need in trail[last]:
                if need not in done:
                    return need
            done.add(last)
            del trail[last]
        return None

    def _check(self) -> Iterator[Problem]:
        cycle = self.find_cycle()
        if cycle:
            text = "dependency cycle: " + " -> ".join(cycle)
            yield Problem("DL320", text, "remove one of these edges", cycle[0], self._place_of_edge(cycle[0], cycle[1]))
        for node in self.nodes.values():
            for field in node.spec.sequences:
                if (edge := node.edges.get(field.name)) is not None:
                    yield from check_sequence(node, field.name, edge, self.nodes)
            if node.spec.has_constraints and self.is_complete(node):
                yield from _constraints(node, self.view(node.name))

    def _place_of_edge(self, name: str, target: str) -> Place:
        """The position of the edge from one node to another."""
        node = self.nodes[name]
        found = (dict(zip(edge.targets, edge.items, strict=False)).get(target) for edge in node.edges.values())
        return node.place_of(next((path for path in found if path), ()))

    def is_complete(self, node: Node) -> bool:
        """Whether a node and its neighbours are valid, so that constraints may rely on their settings and edges."""
        # A wired edge may be missing because the table that it looks for could not become a node.
        has_invalid_tables = not self.recipe.nodes.keys() <= self.nodes.keys()
        missing = any(
            field.name not in node.edges
            and (field.required or field.name in node.table.items or (field.is_wired and has_invalid_tables))
            for field in node.spec.edges
        )
        incomplete = missing or any(edge.incomplete for edge in node.edges.values())
        return not incomplete and not any(self.nodes[name].invalid for name in (node.name, *node.needs))

    def _is_left_out(self, node: Node) -> bool:
        """
        Return whether a node is unused on purpose.

        Either an edit removed a reference to it, or a later layer replaced one, or only recipes that this one extends
        write it: what they have for others is not for this one to remove.
        """
        layers = {id(layer): number for number, layer in enumerate(self.recipe.layers)}
        written = {id(leaf.layer) for leaf in leaves(node.table)}
        newest = max(layers[layer] for layer in written)
        references = {f"@{node.name}", f"@{node.name.partition('.')[0]}.*"}
        if any(
            references & values and (edited or layers[id(layer)] > newest) for layer, values, edited in self._replaced
        ):
            return True
        return not written & {id(layer) for layer in self.recipe.own_layers}

    @cached_property
    def _replaced(self) -> list[tuple[Layer, set[Any], bool]]:
        """The references that each layer's values, or its edits, took from an edge."""
        replaced = []
        for leaf in (leaf for table in self.recipe.nodes.values() for leaf in leaves(table)):
            for new, old in pairwise(leaf.history()):
                replaced.append((new.layer, _references(old.value) - _references(new.value), False))
                replaced.append((new.layer, _references([*new.removed]), True))
        return replaced

    def _check_root(self, complete: bool) -> Iterator[Problem]:
        if self.root not in self.recipe.nodes:
            text, place = f"there is no node [{self.root}], so there is nothing to run", Place(self.recipe.source)
            yield Problem(NO_ROOT, text, f"write [{self.root}]", place=place)
        elif complete:  # otherwise an edge may be missing because of another problem
            needed = set(self.topological_order([self.root]))
            unneeded = [node for name, node in self.nodes.items() if name not in needed and not node.owner]
            for node in unneeded:
                if not self._is_left_out(node):
                    text = f"nothing that [{self.root}] needs leads to this node, so it will not be built"
                    hint = f'refer to it, remove it, or write unset = ["{node.name}"]'
                    yield Problem("DL322", text, hint, node.name, node.place, warning=True)


def _references(value: Any) -> set[Any]:
    """The references in the value of an edge."""
    return {part for part in (value if isinstance(value, list) else [value]) if isinstance(part, str)}


def _constraints(node: Node, view: NodeView) -> Iterator[Problem]:
    # A bug of one component must not hide the problems of others.
    try:
        yield from node.spec.cls.constraints(view)  # type: ignore[attr-defined]
    except Exception as error:
        text = f"the constraints of {view.use!r} can't be checked: {type(error).__name__}: {error}"
        yield Problem("DL206", text, "report it to the author of the component", node.name, node.place)


@attrs.frozen
class Member:
    """One member of a sequence: its node, its index, and the values that it reads, writes and changes."""

    name: str
    number: int
    flow: Flow


@attrs.frozen
class MemberSequence:
    """The first member that writes each value, and the last one that reads it: a sequence may be long."""

    first_writers: Mapping[str, Member]
    last_readers: Mapping[str, Member]

    @classmethod
    def of(cls, members: Sequence[Member]) -> "MemberSequence":
        """Index members in their order."""
        writers = {value: member for member in reversed(members) for value in member.flow.writes}
        return cls(writers, {name.removesuffix("?"): member for member in members for name in member.flow.reads})


def check_sequence(node: Node, field: str, edge: Edge, nodes: Mapping[str, Node]) -> Iterator[Problem]:
    """The order of a sequence edge as a dataflow: no value is read before it is written, or changed too late."""
    first = {target: number for number, target in reversed([*enumerate(edge.targets)])}  # a duplicate is a problem
    members = [Member(name, first[name], nodes[name].spec.traits.flow) for name in dict.fromkeys(edge.targets)]
    sequence = MemberSequence.of(members)
    for member in members:
        place = node.place_of(edge.items[member.number])
        for text, hint in _dataflow_problems(member, sequence, nodes, edge.incomplete):
            yield Problem("DL330", f"{field}: {text}", hint, node.name, place)


def _dataflow_problems(
    member: Member, sequence: MemberSequence, nodes: Mapping[str, Node], incomplete: bool
) -> Iterator[tuple[str, str]]:
    for name in (*member.flow.reads, *member.flow.changes):
        value, verb = name.removesuffix("?"), "changes" if name in member.flow.changes else "reads"
        writer = sequence.first_writers.get(value)
        if writer is None and (name != value or incomplete):
            continue  # the read is optional, or the writer may be a member with problems
        if writer is None:
            others = [name for name, node in nodes.items() if value in node.spec.traits.flow.writes]
            hint = f'add "@{others[0]}" before "@{member.name}"' if others else "add a member that writes it"
            yield f"[{member.name}] {verb} {value}, which nothing in the sequence writes", hint
        elif writer.number >= member.number:
            hint = f'move "@{member.name}" after "@{writer.name}"'
            yield f"[{member.name}] {verb} {value} before [{writer.name}] writes it", hint
    for value in member.flow.changes:
        reader = sequence.last_readers.get(value)
        if reader is not None and reader.number < member.number:
            text = f"[{member.name}] changes {value} after [{reader.name}], the last to read it, so the change is lost"
            yield text, f'move "@{member.name}" before "@{reader.name}"'
