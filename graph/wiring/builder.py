"""
Make nodes with settings and edges from a recipe. Every problem is collected, and no problem hides another.

If an edge has no target, a node is missing or does not fit, or several do.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from drawloom.graph.component import internal, port_needs_named_nodes
from drawloom.graph.problems import KeyPath, Problem, did_you_mean
from drawloom.graph.recipe.layers import Leaf, Table
from drawloom.graph.recipe.merged import VARIABLE, MergedRecipe
from drawloom.graph.registry.registry import Field, Registry
from drawloom.graph.types.port_match import find_mismatches, implements, implements_any, join_mismatches
from drawloom.graph.wiring.node import Edge, Node, format_path
from drawloom.graph.wiring.settings import INVALID_VALUE, SettingsResolver


@attrs.define(eq=False)
class GraphBuilder:
    """Builder of a recipe's nodes. `incomplete` collects the problems of other tables."""

    recipe: MergedRecipe
    registry: Registry
    nodes: dict[str, Node] = attrs.field(factory=dict)
    incomplete: list[Problem] = attrs.field(factory=list)
    _settings: SettingsResolver = internal()

    def __attrs_post_init__(self) -> None:
        self._settings = SettingsResolver(self.recipe.vars, self.recipe.folder, self.recipe.layers)

    def build_nodes_and_edges(self) -> None:
        """Make every node with its settings, and then resolve and check every edge."""
        for name, table in self.recipe.nodes.items():
            self._make_node(name, table)
        edges = EdgeResolver(self.recipe, self.registry, self.nodes, self._settings, self._make_node)
        for node in list(self.nodes.values()):  # a copy: resolving edges adds inline nodes
            edges.resolve_edges(node)
        edges.report_unnamed_inline_nodes()

    def problems(self) -> Iterator[Problem]:
        """Yield all problems with nodes and other tables."""
        yield from self.incomplete
        for node in self.nodes.values():
            yield from node.problems

    def _make_node(self, name: str, table: Table, owner: str = "") -> Node | None:
        """Make a table's node with its settings; report a problem and return None if its component is invalid."""
        use = table.items["use"]
        if not (isinstance(use, Leaf) and isinstance(use.value, str)):
            text = "`use` must be a string, the name of a component"
            self.incomplete.append(Problem("DL204", text, node=name, position=use.position))
            return None
        spec = self.registry.find(use.value)
        if isinstance(spec, Problem):
            self.incomplete.append(attrs.evolve(spec, node=name, position=use.position))
            return None
        node = self.nodes[name] = Node(name, table, spec, owner)
        for module, install in spec.traits.needs.items():
            # find_spec does not import: the package may take seconds, and `check` does not need it.
            if importlib.util.find_spec(module) is None:
                text = f"{use.value!r} needs the package {module!r}, which is not installed"
                node.add_problem("DL202", text, f"pip install '{install}'")
        self._settings.resolve(node)
        return node


@attrs.define(eq=False)
class EdgeResolver:
    """Resolver of the nodes' edges. `make` makes a node from an inline table, or returns None for an invalid table."""

    recipe: MergedRecipe
    registry: Registry
    nodes: dict[str, Node]
    settings: SettingsResolver
    make: Callable[[str, Table, str], Node | None]
    _fitting: dict[tuple[type, ...], list[str]] = attrs.field(factory=dict)

    def resolve_edges(self, node: Node) -> None:
        """Resolve a node's edges, and the edges in its inline nodes."""
        items = node.table.items
        for field in node.spec.edges:
            item = items.get(field.name)
            if item is None:
                if field.required or field.is_wired:
                    self._wire_by_type(node, field)
            elif field.kind in ("one", "optional"):
                path = (field.name,)
                value = self._substitute_variable(node, item, field)
                targets = self._find_target_if_fitting(field, value) or self._resolve_targets(node, field, value, path)
                if len(targets) == 1:
                    node.set_edge(field.name, Edge(targets, (), (path,)))
            elif field.kind == "mapping":
                self._connect_mapping(node, field, item)
            else:
                self._connect_list(node, field, item)

    def _substitute_variable(self, node: Node, item: Leaf | Table, field: Field) -> Leaf | Table | Any:
        """Return an edge's value, with a variable substituted."""
        if not isinstance(item, Leaf):
            return item
        value = item.value
        is_variable = isinstance(value, str) and value[:1] == "$" and value.startswith(VARIABLE)
        return self.settings.resolve_variable(node, value, (field.name,)) if is_variable else value

    def _connect_list(self, node: Node, field: Field, item: Leaf | Table) -> None:
        """Resolve a list edge's elements, and connect the node to their targets."""
        values = self._substitute_variable(node, item, field)
        if values is INVALID_VALUE:
            return
        if not isinstance(values, list):
            text = f"{field.name} must be an array of nodes"
            hint = f'write {field.name} = ["@name", ...]'
            return node.add_problem("DL310", text, hint, (field.name,))
        targets: list[str] = []
        items: list[KeyPath] = []
        for number, value in enumerate(values):
            path = (field.name, number)
            for target in self._find_target_if_fitting(field, value) or self._resolve_targets(
                node, field, value, path, many=True
            ):
                targets.append(target)
                items.append(path)
        self._report_duplicate_targets(node, field, targets, items)
        # A group "@group.*" adds several targets for one element, so elements are counted, not targets.
        incomplete = len({path[1] for path in items}) < len(values)
        node.set_edge(field.name, Edge(tuple(targets), items=tuple(items), incomplete=incomplete))

    def _report_duplicate_targets(self, node: Node, field: Field, targets: list[str], items: list[KeyPath]) -> None:
        if len(set(targets)) == len(targets):
            return
        first = {target: number for number, target in reversed([*enumerate(targets)])}
        for number, (target, path) in enumerate(zip(targets, items, strict=True)):
            if first[target] != number:
                text = f"{format_path(path)}: [{target}] is in the list already"
                node.add_problem("DL318", text, "remove it, or write a second node in a table of its own", path)

    def _connect_mapping(self, node: Node, field: Field, item: Leaf | Table) -> None:
        if not isinstance(item, Table):
            text, hint = f"{field.name} must be a table of nodes", f'write {field.name} = {{ name = "@node" }}'
            return node.add_problem("DL310", text, hint, (field.name,))
        targets: dict[str, str] = {}
        for key, value in item.items.items():
            plain = value.value if isinstance(value, Leaf) else value
            for target in self._resolve_targets(node, field, plain, (field.name, key)):
                targets[key] = target
        paths = tuple((field.name, key) for key in targets)
        node.set_edge(field.name, Edge(tuple(targets.values()), tuple(targets), paths))

    def _find_target_if_fitting(self, field: Field, value: Any) -> tuple[str, ...]:
        """Return the node named by a written edge if it fits, the common case. Otherwise return an empty tuple."""
        name = value[1:] if isinstance(value, str) and value[:1] == "@" else ""
        target = self.nodes.get(name)
        return (name,) if target is not None and implements_any(target.spec.cls, field.ports) else ()

    def _resolve_targets(
        self, node: Node, field: Field, value: Any, path: KeyPath, *, many: bool = False
    ) -> tuple[str, ...]:
        """
        Return the names of the nodes that an edge in the recipe refers to, or defines inline.

        Unknown names, and nodes without the field's port, are left out, and reported as problems.
        """
        if isinstance(value, str) and value[:1] == "@":
            names = self._find_named_targets(node, value[1:], path, many)
        elif isinstance(value, dict | Table):
            names = self._make_inline_node(node, field, value, path)
        elif value is INVALID_VALUE:
            return ()
        else:
            from drawloom.graph.types.describe import describe

            hint = f'write "@{value}"' if isinstance(value, str) else 'write "@name"'
            node.add_problem("DL311", f"{format_path(path)} must be a node, not {describe(value)}", hint, path)
            return ()
        return tuple(name for name in names if self._implements_port_or_report(node, field, name, path))

    def _make_inline_node(self, node: Node, field: Field, value: dict[str, Any] | Table, path: KeyPath) -> list[str]:
        """Make the node in an inline table, and resolve its edges; return its name in a list, empty after a problem."""
        container = node.table.items[field.name]
        layer, at = container.origin(path[1:])
        table = value if isinstance(value, Table) else Table.from_values(value, layer, at)
        if "use" not in table.items:
            text = f"{format_path(path)} is a table without `use`, so it is not a node"
            node.add_problem("DL312", text, 'write { use = "...", ... } or "@name"', path)
            return []
        inline_node = self.make(f"{node.name}.{format_path(path)}", table, node.name)
        if inline_node is None:
            return []
        self.resolve_edges(inline_node)
        return [inline_node.name]

    def _find_named_targets(self, node: Node, name: str, path: KeyPath, many: bool) -> list[str]:
        """Return the node named by "@name", or all members for "@group.*"; report a missing one."""
        if name in self.nodes:
            return [name]
        group = name.removesuffix(".*")
        if name.endswith(".*") and many and group in self.recipe.groups:
            return [member for member in self.recipe.groups[group] if member in self.nodes]
        if name not in self.recipe.nodes:
            report_missing_target(node, name, path, many, self.recipe)
        return []

    def _implements_port_or_report(self, node: Node, field: Field, name: str, path: KeyPath) -> bool:
        target = self.nodes[name]
        if not implements_any(target.spec.cls, field.ports):
            ports = " or ".join(port.__name__ for port in field.ports)
            node.add_problem(
                "DL314", f"{format_path(path)} needs a {ports}, but {explain_misfit(target, field)}", "", path
            )
            return False
        return True

    def _wire_by_type(self, node: Node, field: Field) -> None:
        # A node can't depend on itself.
        fitting = [name for name in self._find_implementers_with_own_table(field) if name != node.name]
        if field.kind == "list" and field.is_wired:
            if fitting:
                node.set_edge(field.name, Edge(tuple(fitting), written=False))
        elif field.kind not in ("one", "optional"):
            shape = '{ name = "@node" }' if field.kind == "mapping" else '["@name", ...]'
            node.add_problem(
                "DL315", f"{node.spec.use!r} needs the edge {field.name!r}", f"write {field.name} = {shape}"
            )
        elif len(fitting) == 1:
            node.set_edge(field.name, Edge((fitting[0],), written=False))
        elif not fitting and field.kind == "optional":
            return
        elif len(self.nodes) >= len(self.recipe.nodes):  # otherwise an invalid table may be the node
            report_missing_or_ambiguous_target(node, field, fitting, self.nodes, self.registry)

    def _find_implementers_with_own_table(self, field: Field) -> list[str]:
        """Return the nodes with their own tables that implement a field's port."""
        # Cached: matching is slow, and many nodes have an edge with the same port.
        if field.ports not in self._fitting:
            nodes = [node for node in self.nodes.values() if not node.owner]
            self._fitting[field.ports] = [node.name for node in nodes if implements_any(node.spec.cls, field.ports)]
        return self._fitting[field.ports]

    def report_unnamed_inline_nodes(self) -> None:
        """
        Report inline nodes implementing a port whose nodes need names, because saved state is keyed by these names.
        """
        inline_nodes = [node for node in self.nodes.values() if node.owner]
        specs = {node.spec.use: node.spec for node in self.nodes.values()} if inline_nodes else {}
        ports = {port for spec in specs.values() for field in spec.fields.values() for port in field.ports}
        for node in inline_nodes:
            for port in filter(port_needs_named_nodes, ports):
                if implements(node.spec.cls, port):
                    reason = "whose name is saved with its state, so it can't be written inline"
                    text = f"{node.spec.use!r} is a {port.__name__}, {reason}"
                    node.add_problem("DL317", text, f'give it a table of its own and write "@name" in [{node.owner}]')


MAX_CANDIDATES_SHOWN = 6
"""Candidates for an edge in a message."""


def report_missing_target(node: Node, name: str, path: KeyPath, many: bool, recipe: MergedRecipe) -> None:
    """Report an edge to an unknown node or group."""
    group = name.removesuffix(".*")
    if group in recipe.groups:
        hint = (
            f'write "@{group}.*" for all its members'
            if many
            else "this edge accepts a single node: name a member of the group"
        )
        text = f"{format_path(path)}: {group!r} is a group, not a node"
    else:
        text = f"{format_path(path)}: there is no {'group' if name.endswith('.*') else 'node'} {group!r}"
        hint = did_you_mean(group, recipe.groups if name.endswith(".*") else recipe.nodes)
    node.add_problem("DL313", text, hint, path)


def report_missing_or_ambiguous_target(
    node: Node, field: Field, fitting: list[str], nodes: Mapping[str, Node], registry: Registry
) -> None:
    """Report that none or several of the recipe's `nodes` fit an edge which the recipe leaves out."""
    port = " or ".join(port.__name__ for port in field.ports)
    if not fitting:
        text = f"{node.spec.use!r} needs a {port} for {field.name!r}, but no node implements it"
        uses = [spec.use for spec in registry.specs() if implements_any(spec.cls, field.ports)]
        more = " or another" if len(uses) > MAX_CANDIDATES_SHOWN else ""
        named = " or ".join(f'"{use}"' for use in uses[:MAX_CANDIDATES_SHOWN])
        hint = f"add a node with use = {named}{more}" if uses else "add a node that implements it"
        if (namesake := nodes.get(field.name)) is not None:  # another component was written there
            text += f": {explain_misfit(namesake, field)}"
            hint = f"`drawloom list --fits {namesake.name}` lists the components that do"
        return node.add_problem("DL316", text, hint)
    remaining = [f"{len(fitting) - MAX_CANDIDATES_SHOWN} more"] if len(fitting) > MAX_CANDIDATES_SHOWN else []
    *most, last = [*(f"[{name}]" for name in fitting[:MAX_CANDIDATES_SHOWN]), *remaining]
    names = f"{', '.join(most)} and {last}"
    hint = "write " + " or ".join(f'{field.name} = "@{name}"' for name in fitting[:MAX_CANDIDATES_SHOWN])
    quantifier = "both" if len(fitting) == 2 else "all"
    node.add_problem("DL316", f"{field.name!r} needs one {port}, but {names} {quantifier} implement it", hint)


def explain_misfit(node: Node, field: Field) -> str:
    """Return a node's component, and why it does not implement a field's port."""
    why = join_mismatches([reason for port in field.ports for reason in find_mismatches(node.spec.cls, port)[:2]])
    return f"[{node.name}] is {node.spec.use!r}: it {why}"
