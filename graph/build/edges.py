"""Edges of nodes: what is written is followed, what may be left out is found by type, and each end must fit."""

from collections.abc import Callable, Iterator
from typing import Any

import attrs

from drawloom.graph.build.node import Draft, Edge, dotted
from drawloom.graph.build.settings import INVALID, SettingsResolver
from drawloom.graph.port import is_named
from drawloom.graph.recipe.layers import Leaf, Path, Table
from drawloom.graph.recipe.recipe import Recipe
from drawloom.graph.recipe.variables import VARIABLE
from drawloom.graph.registry.spec import Field, Spec
from drawloom.graph.toml.suggest import did_you_mean
from drawloom.graph.types.port_match import implements, mismatches

MOST = 6
"""Candidates for an edge that a message names."""


@attrs.define(eq=False)
class EdgeResolver:
    """Connects nodes. `make` makes the node of a table that stands in place, or nothing if it can't be one."""

    recipe: Recipe
    nodes: dict[str, Draft]
    settling: SettingsResolver
    make: Callable[[str, Table, str], Draft | None]
    _fitting: dict[tuple[type, ...], list[str]] = attrs.field(factory=dict)

    def connect_all(self, node: Draft) -> None:
        """Follow or find every edge of a node, and of the nodes that stand in place in it."""
        for field in node.spec.fields.values():
            if field.is_edge:
                self._connect(node, field)

    def _connect(self, node: Draft, field: Field) -> None:
        item = node.table.items.get(field.name)
        if item is None:
            return self._autowire(node, field)
        if field.kind in ("one", "optional"):
            targets = list(self._refer(node, field, self._substitute(node, item, field), (field.name,)))
            if len(targets) == 1:
                node.edges[field.name] = Edge((targets[0],), items=((field.name,),))
        elif field.kind == "mapping":
            self._connect_mapping(node, field, item)
        else:
            self._connect_list(node, field, item)

    def _substitute(self, node: Draft, item: Leaf | Table, field: Field) -> Leaf | Table | Any:
        """An edge's value, with a variable put in."""
        if isinstance(item, Leaf) and isinstance(item.value, str) and item.value.startswith(VARIABLE):
            return self.settling.variable(node, item.value, (field.name,))
        return item.value if isinstance(item, Leaf) else item

    def _connect_list(self, node: Draft, field: Field, item: Leaf | Table) -> None:
        values = self._substitute(node, item, field)
        if values is INVALID:
            return
        if not isinstance(values, list):
            text = f"{field.name} takes an array of nodes"
            hint = f'write {field.name} = ["@name", ...]'
            return node.fault("DL310", text, hint, (field.name,))
        targets: list[str] = []
        items: list[Path] = []
        for number, value in enumerate(values):
            found = list(self._refer(node, field, value, (field.name, number), many=True))
            targets += found
            items += [(field.name, number)] * len(found)
        self._refuse_twice(node, field, targets, items)
        unmade = len({path[1] for path in items}) < len(values)
        node.edges[field.name] = Edge(tuple(targets), items=tuple(items), incomplete=unmade)

    def _refuse_twice(self, node: Draft, field: Field, targets: list[str], items: list[Path]) -> None:
        if len(set(targets)) == len(targets):
            return
        first = {target: number for number, target in reversed([*enumerate(targets)])}
        for number, (target, path) in enumerate(zip(targets, items, strict=True)):
            if first[target] != number:
                text = f"{dotted(path)}: [{target}] is in the list already"
                node.fault("DL318", text, "leave it out, or give the second a table of its own", path)

    def _connect_mapping(self, node: Draft, field: Field, item: Leaf | Table) -> None:
        if not isinstance(item, Table):
            text, hint = f"{field.name} takes a table of nodes", f'write {field.name} = {{ name = "@node" }}'
            return node.fault("DL310", text, hint, (field.name,))
        targets: dict[str, str] = {}
        for key, value in item.items.items():
            plain = value.value if isinstance(value, Leaf) else value
            for target in self._refer(node, field, plain, (field.name, key)):
                targets[key] = target
        paths = tuple((field.name, key) for key in targets)
        node.edges[field.name] = Edge(tuple(targets.values()), tuple(targets), paths)

    def _refer(self, node: Draft, field: Field, value: Any, path: Path, *, many: bool = False) -> Iterator[str]:
        """The names of the nodes that one written edge leads to, each checked against the field's port."""
        if value is INVALID:
            return
        if isinstance(value, dict | Table):
            names = self._in_place(node, field, value, path)
        elif isinstance(value, str) and value.startswith("@"):
            names = self._named(node, field, value[1:], path, many)
        else:
            hint = f'write "@{value}"' if isinstance(value, str) else 'write "@name"'
            node.fault("DL311", f"{dotted(path)} takes a node, not {self.settling.values.describe(value)}", hint, path)
            return
        for name in names:
            if self._accepts(node, field, name, path):
                yield name

    def _in_place(self, node: Draft, field: Field, value: dict[str, Any] | Table, path: Path) -> list[str]:
        holder = node.table.items[field.name]
        table = value if isinstance(value, Table) else Table.of(value, holder.layer, (*holder.path, *path[1:]))
        if "use" not in table.items:
            text = f"{dotted(path)} is a table without `use`, so it is no node"
            node.fault("DL312", text, 'write { use = "...", ... } or "@name"', path)
            return []
        made = self.make(f"{node.name}.{dotted(path)}", table, node.name)
        if made is None:
            return []
        self.connect_all(made)
        return [made.name]

    def _named(self, node: Draft, field: Field, name: str, path: Path, many: bool) -> list[str]:
        group = name.removesuffix(".*")
        if name.endswith(".*") and many and group in self.recipe.groups:
            return [member for member in self.recipe.groups[group] if member in self.nodes]
        if name in self.nodes:
            return [name]
        if name not in self.recipe.nodes:
            self._missing_target(node, name, path, many)
        return []

    def _missing_target(self, node: Draft, name: str, path: Path, many: bool) -> None:
        group = name.removesuffix(".*")
        if group in self.recipe.groups:
            hint = f'write "@{group}.*" for all its members' if many else "it takes a single node"
            text = f"{dotted(path)}: {group!r} is a group, not a node"
        else:
            text = f"{dotted(path)}: there is no {'group' if name.endswith('.*') else 'node'} {group!r}"
            hint = did_you_mean(group, self.recipe.groups if name.endswith(".*") else self.recipe.nodes)
        node.fault("DL313", text, hint, path)

    def _accepts(self, node: Draft, field: Field, name: str, path: Path) -> bool:
        target = self.nodes[name]
        if not self.fits(target.spec, field):
            ports = " or ".join(port.__name__ for port in field.ports)
            why = " and ".join(reason for port in field.ports for reason in mismatches(target.spec.cls, port)[:2])
            text = f"{dotted(path)} needs a {ports}, but [{name}] is {target.spec.use!r}: it {why}"
            node.fault("DL314", text, "", path)
            return False
        return True

    def _autowire(self, node: Draft, field: Field) -> None:
        if not field.required:
            return
        if field.kind != "one":
            shape = '{ name = "@node" }' if field.kind == "mapping" else '["@name", ...]'
            return node.fault(
                "DL315", f"{node.spec.use!r} needs the edge {field.name!r}", f"write {field.name} = {shape}"
            )
        fitting = [name for name in self._candidates(field) if name != node.name]
        if len(fitting) == 1:
            node.edges[field.name] = Edge((fitting[0],), written=False)
        elif len(self.nodes) >= len(self.recipe.nodes):  # else the one that is missing may be one that is at fault
            self._report_ambiguous(node, field, fitting)

    def _candidates(self, field: Field) -> list[str]:
        """The nodes with a table of their own that fit; no others come to be while nodes are connected."""
        if field.ports not in self._fitting:
            nodes = [node for node in self.nodes.values() if not node.owner]
            self._fitting[field.ports] = [node.name for node in nodes if self.fits(node.spec, field)]
        return self._fitting[field.ports]

    def _report_ambiguous(self, node: Draft, field: Field, fitting: list[str]) -> None:
        port = " or ".join(port.__name__ for port in field.ports)
        if not fitting:
            text = f"{node.spec.use!r} needs a {port} for {field.name!r}, and no node is one"
            return node.fault("DL316", text, "add a node that is")
        more = [f"{len(fitting) - MOST} more"] if len(fitting) > MOST else []
        *most, last = [*(f"[{name}]" for name in fitting[:MOST]), *more]
        names = f"{', '.join(most)} and {last}"
        hint = "write " + " or ".join(f'{field.name} = "@{name}"' for name in fitting[:MOST])
        all_of_them = "both" if len(fitting) == 2 else "all"
        node.fault("DL316", f"{field.name!r} needs one {port}, and {names} {all_of_them} are", hint)

    def fits(self, spec: Spec, field: Field) -> bool:
        """Whether a component keeps the promises of any of a field's ports."""
        return any(implements(spec.cls, port) for port in field.ports)

    def refuse_unnamed(self) -> None:
        """Refuse nodes in place whose port wants them to have names."""
        ports = {port for node in self.nodes.values() for field in node.spec.fields.values() for port in field.ports}
        for node in self.nodes.values():
            for port in ports:
                if node.owner and is_named(port) and implements(node.spec.cls, port):
                    text = f"{node.spec.use!r} is {port.__name__}, so it is known by its name and can't stand in place"
                    node.fault("DL317", text, f'give it a table of its own and write "@name" in [{node.owner}]')
