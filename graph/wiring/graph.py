"""The graph of a recipe: nodes, edges, their order, and the checks of the whole graph."""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import attrs

from drawloom.graph.component import Flow
from drawloom.graph.garbage import pause_garbage_collection
from drawloom.graph.problems import Position, Problem, RecipeError, sort_and_deduplicate_problems
from drawloom.graph.recipe.layers import Layer, iterate_leaves
from drawloom.graph.recipe.merged import MergedRecipe
from drawloom.graph.registry.registry import Registry
from drawloom.graph.types.port_match import implements
from drawloom.graph.wiring.builder import GraphBuilder
from drawloom.graph.wiring.node import Edge, Node, NodeView

NO_ROOT = "DL321"


class _Removal(NamedTuple):
    """References that a layer removes from an edge, by another value or by an edit."""

    layer: Layer
    references: set[Any]
    is_edit: bool


@attrs.frozen(eq=False, slots=False)
class Graph:
    """Nodes by name, and all problems of the recipe. Immutable: other values make another graph."""

    recipe: MergedRecipe
    registry: Registry
    nodes: Mapping[str, Node]
    root: str = ""
    problems: tuple[Problem, ...] = ()
    _orders: dict[tuple[str, ...], list[str]] = attrs.field(factory=dict)
    """Cache of topological orders by roots, shared by the checks and the container."""

    @classmethod
    @pause_garbage_collection()
    def build(cls, recipe: MergedRecipe, registry: Registry, root: str = "") -> "Graph":
        """Build and check the graph of a recipe. If `root` is set, report unneeded nodes as warnings."""
        builder = GraphBuilder(recipe, registry)
        builder.build_nodes_and_edges()
        graph = cls(recipe, registry, MappingProxyType(builder.nodes), root)
        problems = [*recipe.problems, *builder.problems(), *graph._check_cycles_dataflow_and_constraints()]
        problems += graph._check_root_and_unneeded_nodes(all(problem.warning for problem in problems)) if root else ()
        return attrs.evolve(graph, problems=tuple(sort_and_deduplicate_problems(problems)))

    def with_values(self, data: Mapping[str, Any], source: str = "override") -> "Graph":
        """Return the graph for this recipe with other values merged over it."""
        return Graph.build(self.recipe.with_values(data, source), self.registry, self.root)

    @property
    def errors(self) -> list[Problem]:
        """The problems except warnings."""
        return [problem for problem in self.problems if not problem.warning]

    def require_valid(self) -> "Graph":
        """Return this graph, or raise RecipeError with all its errors."""
        if errors := self.errors:
            raise RecipeError(errors)
        return self

    def view(self, name: str) -> NodeView:
        """Return the view of a node for `constraints`."""
        return NodeView(self.nodes[name], self.nodes)

    def needs(self, name: str) -> tuple[str, ...]:
        """Return the target nodes of a node's edges, in order and without duplicates."""
        return self.nodes[name].needs

    def users(self, name: str) -> list[str]:
        """Return the nodes whose edges lead to this node."""
        return [other for other in self.nodes if name in self.needs(other)]

    def list_users_with_edge_names(self, name: str) -> list[tuple[str, list[str]]]:
        """Return (user, names of its edges to this node) for every user of a node."""
        edges_by_user = {
            user: [key for key, edge in node.edges.items() if name in edge.targets] for user, node in self.nodes.items()
        }
        return [(user, keys) for user, keys in edges_by_user.items() if keys]

    def list_needed_ports_implemented_by(self, name: str) -> set[type]:
        """Return the ports implemented by a node's component, among the ports needed by edges in the graph."""
        fields = (field for node in self.nodes.values() for field in node.spec.fields.values())
        ports = {port for field in fields for port in field.ports}
        return {port for port in ports if implements(self.nodes[name].spec.cls, port)}

    def implementers(self, port: type) -> list[str]:
        """Return the nodes whose components implement a port."""
        return [name for name, node in self.nodes.items() if implements(node.spec.cls, port)]

    def topological_order(self, roots: Iterable[str], without: Container[str] = ()) -> list[str]:
        """
        Return `roots` and all their direct and indirect dependencies. A node follows its dependencies.

        Nodes in `without` are included, but not their dependencies. In a dependency cycle, some node precedes a
        dependency.
        """
        asked = tuple(roots)
        if without:
            return self._order_depth_first(asked, without)
        if asked not in self._orders:
            self._orders[asked] = self._order_depth_first(asked, without)
        return list(self._orders[asked])

    def _order_depth_first(self, roots: Sequence[str], without: Container[str]) -> list[str]:
        # Depth-first with an explicit stack: a chain of nodes may be longer than Python's recursion limit.
        order: dict[str, None] = {}
        entered: set[str] = set()
        stack = [*reversed(roots)]
        while stack:
            name = stack[-1]
            if name in entered:  # the order contains every node it needs
                order[stack.pop()] = None
            else:
                entered.add(name)
                if name not in without:
                    stack += [need for need in reversed(self.nodes[name].needs) if need not in entered]
        return list(order)

    def valid_nodes(self, roots: Iterable[str]) -> list[str]:
        """
        Return `roots` and their dependencies in topological order, without nodes depending on a node with an error.
        """
        faulty = {problem.node for problem in self.errors}
        valid: dict[str, None] = {}
        for name in self.topological_order(roots):
            node = self.nodes[name]
            if name not in faulty and self.is_valid_with_neighbours(node) and all(need in valid for need in node.needs):
                valid[name] = None
        return list(valid)

    def restrict_to(self, roots: Iterable[str]) -> "Graph":
        """Return the graph for `roots` and their dependencies, with their problems. Other nodes may be unknown."""
        nodes = {name: self.nodes[name] for name in self.topological_order(roots)}
        # An edge may be missing because its target table could not become a node.
        broken = not all(self.is_valid_with_neighbours(node) for node in nodes.values())
        problems = tuple(
            p for p in self.problems if p.node in nodes or (broken and p.node not in self.nodes and p.code != NO_ROOT)
        )
        return attrs.evolve(self, nodes=MappingProxyType(nodes), problems=problems, orders={})

    def find_cycle(self) -> list[str]:
        """Return a dependency cycle ending with its first node, or an empty list."""
        if self._is_acyclic():
            return []
        done: set[str] = set()
        for start in self.nodes:
            # Path from `start`, as unvisited needs by node. Not recursive, since a chain may be long.
            trail: dict[str, Iterator[str]] = {}
            name: str | None = start
            while name is not None and name not in done:
                if name in trail:
                    names = list(trail)
                    return [*names[names.index(name) :], name]
                trail[name] = iter(self.needs(name))
                name = self._advance_trail(trail, done)
        return []

    def _is_acyclic(self) -> bool:
        order = self.topological_order([self.root]) if self.root in self.nodes else []
        if len(order) < len(self.nodes):
            order = self.topological_order(self.nodes)
        visited: set[str] = set()
        for name in order:
            if not visited.issuperset(self.nodes[name].needs):
                return False
            visited.add(name)
        return True

    def _advance_trail(self, trail: dict[str, Iterator[str]], done: set[str]) -> str | None:
        """Return the next node to visit, a dependency on the trail; pop finished nodes. None at the end."""
        while trail:
            last = next(reversed(trail))
            for need in trail[last]:
                if need not in done:
                    return need
            done.add(last)
            del trail[last]
        return None

    def _check_cycles_dataflow_and_constraints(self) -> Iterator[Problem]:
        cycle = self.find_cycle()
        if cycle:
            text = "dependency cycle: " + " -> ".join(cycle)
            node = self.nodes[cycle[0]]
            paths = (dict(zip(edge.targets, edge.items, strict=False)).get(cycle[1]) for edge in node.edges.values())
            position = node.position_of(next(filter(None, paths), ()))
            yield Problem("DL320", text, "remove one of these edges", node.name, position)
        for node in self.nodes.values():
            for field in node.spec.sequences:
                if (edge := node.edges.get(field.name)) is not None:
                    yield from check_sequence_dataflow(node, field.name, edge, self.nodes)
            if node.spec.has_constraints_method and self.is_valid_with_neighbours(node):
                yield from _check_constraints(node, self.view(node.name))

    def is_valid_with_neighbours(self, node: Node) -> bool:
        """Return whether a node and its neighbours are valid. Constraints rely on valid settings and edges."""
        missing = any(
            field.name not in node.edges
            and (field.required or field.name in node.table.items or (field.is_wired and self._may_lack_wired_edges))
            for field in node.spec.edges
        )
        incomplete = missing or any(edge.incomplete for edge in node.edges.values())
        return not incomplete and not any(self.nodes[name].is_invalid for name in (node.name, *node.needs))

    @cached_property
    def _may_lack_wired_edges(self) -> bool:
        """Whether an invalid table is named by no edge, and might be found by type."""
        invalid = self.recipe.nodes.keys() - self.nodes.keys()
        leaves = (leaf for table in self.recipe.nodes.values() if invalid for leaf in iterate_leaves(table))
        named = {name for leaf in leaves for name in _collect_references(leaf.value)}
        return any(not {f"@{name}", f"@{name.partition('.')[0]}.*"} & named for name in invalid)

    def _is_unused_on_purpose(self, node: Node) -> bool:
        """
        Return whether a node is unused on purpose.

        Either an edit removed a reference to the node, or a later layer replaced one, or only extended recipes write
        the node: this recipe need not remove nodes that its bases keep for other recipes.
        """
        layers = {id(layer): number for number, layer in enumerate(self.recipe.layers)}
        written = {id(leaf.layer) for leaf in iterate_leaves(node.table)}
        newest = max(layers[layer] for layer in written)
        references = {f"@{node.name}", f"@{node.name.partition('.')[0]}.*"}
        if any(
            references & removal.references and (removal.is_edit or layers[id(removal.layer)] > newest)
            for removal in self._removals_of_references
        ):
            return True
        return not written & {id(layer) for layer in self.recipe.own_layers}

    @cached_property
    def _removals_of_references(self) -> list[_Removal]:
        """The references removed from edges by values or edits of a layer."""
        removals = []
        edges = (item for node in self.nodes.values() for key, item in node.table.items.items() if key in node.edges)
        for leaf in (leaf for edge in edges for leaf in iterate_leaves(edge)):
            for new, old in pairwise(leaf.history()):
                replaced = _collect_references(old.value) - _collect_references(new.value)
                removals.append(_Removal(new.layer, replaced, is_edit=False))
                removals.append(_Removal(new.layer, _collect_references([*new.removed]), is_edit=True))
        return removals

    def _check_root_and_unneeded_nodes(self, is_otherwise_valid: bool) -> Iterator[Problem]:
        if self.root not in self.recipe.nodes:
            text, position = f"there is no node [{self.root}], so there is nothing to run", Position(self.recipe.source)
            yield Problem(NO_ROOT, text, f"write [{self.root}]", position=position)
        elif is_otherwise_valid:  # otherwise an edge may be missing because of another problem
            needed = set(self.topological_order([self.root]))
            unneeded = [node for name, node in self.nodes.items() if name not in needed and not node.owner]
            for node in unneeded:
                if not self._is_unused_on_purpose(node):
                    text = f"no node that [{self.root}] needs refers to this node, so it will not be built"
                    hint = f'refer to it, remove it, or write unset = ["{node.name}"]'
                    yield Problem("DL322", text, hint, node.name, node.position, warning=True)


def _collect_references(value: Any) -> set[Any]:
    """Return the references in an edge's value."""
    return {part for part in (value if isinstance(value, list) else [value]) if isinstance(part, str)}


def _check_constraints(node: Node, view: NodeView) -> Iterator[Problem]:
    # A bug of one component must not hide the problems of others.
    try:
        yield from node.spec.cls.constraints(view)  # type: ignore[attr-defined]
    except Exception as error:
        text = f"the constraints of {view.use!r} can't be checked: {type(error).__name__}: {error}"
        yield Problem("DL206", text, "report it to the author of the component", node.name, node.position)


@attrs.frozen
class Member:
    """A member of a sequence: its node, its index, and the values it reads, writes and changes."""

    name: str
    number: int
    flow: Flow


def check_sequence_dataflow(node: Node, field: str, edge: Edge, nodes: Mapping[str, Node]) -> Iterator[Problem]:
    """
    Check the order in a sequence edge as a dataflow: values are written before they are read, and changed in time.
    """
    first = {target: number for number, target in reversed([*enumerate(edge.targets)])}  # a duplicate is a problem
    members = [Member(name, first[name], nodes[name].spec.traits.flow) for name in dict.fromkeys(edge.targets)]
    # the first writer and the last reader of every value, because a sequence may be long
    writers = {value: member for member in reversed(members) for value in member.flow.writes}
    readers = {name.removesuffix("?"): member for member in members for name in member.flow.reads}
    for member in members:
        position = node.position_of(edge.items[member.number])
        for text, hint in _find_wrong_orders_with_hints(member, writers, readers, nodes, edge):
            yield Problem("DL330", f"{field}: {text}", hint, node.name, position)


def _find_wrong_orders_with_hints(
    member: Member, writers: Mapping[str, Member], readers: Mapping[str, Member], nodes: Mapping[str, Node], edge: Edge
) -> Iterator[tuple[str, str]]:
    for name in (*member.flow.reads, *member.flow.changes):
        value, verb = name.removesuffix("?"), "changes" if name in member.flow.changes else "reads"
        writer = writers.get(value)
        if writer is None and (name != value or edge.incomplete):
            continue  # the read is optional, or the writer may be a member with problems
        if writer is None:
            others = [name for name, node in nodes.items() if value in node.spec.traits.flow.writes]
            hint = f'add "@{others[0]}" before "@{member.name}"' if others else "add a member that writes it"
            yield f"[{member.name}] {verb} {value}, but no member of the sequence writes it", hint
        elif writer.number >= member.number:
            hint = f'move "@{member.name}" after "@{writer.name}"'
            yield f"[{member.name}] {verb} {value} before [{writer.name}] writes it", hint
    for other, value in {writers[value].name: value for value in reversed(member.flow.writes)}.items():
        if other != member.name:
            text = f"[{member.name}] writes {value} again, so the value of [{other}] is lost"
            yield text, f'remove "@{member.name}" or "@{other}"'
    for value in member.flow.changes:
        reader = readers.get(value)
        if reader is not None and reader.number < member.number:
            text = f"[{member.name}] changes {value} after the last reader [{reader.name}], so the change is lost"
            yield text, f'move "@{member.name}" before "@{reader.name}"'
