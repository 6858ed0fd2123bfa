"""Living objects: built once each in order, opened, handed out, closed in reverse whatever happens."""

from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

import attrs

from drawloom.graph.fit import misfits
from drawloom.graph.graph import Graph
from drawloom.graph.node import Edge, Node
from drawloom.graph.port import Every, Ordered
from drawloom.graph.problems import UserError
from drawloom.graph.resolved import ResolvedRecipe
from drawloom.graph.spec import Field


@attrs.define(eq=False)
class Container(Mapping[str, Any]):
    """
    The objects of a graph's nodes, those that `roots` need.

    `build` constructs, which costs little; as a context manager it also opens what has `open()`, in order, and closes
    what has `close()`, in reverse. `given` are objects to use in place of nodes.
    """

    graph: Graph
    roots: list[str]
    recipe: ResolvedRecipe
    given: dict[str, Any] = attrs.field(factory=dict)
    _objects: dict[str, Any] = attrs.field(factory=dict, init=False)
    _open: list[str] = attrs.field(factory=list, init=False)

    def build(self) -> None:
        """Construct every needed node once, then fill in what takes every node of a kind."""
        self._objects = dict(self.given)
        for name in self._order():
            if name not in self._objects:
                self._objects[name] = self._construct(self.graph.nodes[name])
        for name in self._objects.keys() - self.given.keys():
            self._fill(name)

    def _order(self) -> list[str]:
        if not self.given:
            return self.graph.closure(self.roots)
        cut = attrs.evolve(self.graph, nodes={name: self._without_edges(name) for name in self.graph.nodes})
        return cut.closure(self.roots)

    def _without_edges(self, name: str) -> Node:
        node = self.graph.nodes[name]
        return attrs.evolve(node, edges={}) if name in self.given else node

    def _construct(self, node: Node) -> Any:
        values = dict(node.settings)
        for field in node.spec.fields.values():
            if field.is_edge and field.name in node.edges:
                values[field.name] = self._edge(field, node.edges[field.name])
            elif field.kind == "every":
                values[field.name] = Every()
            elif field.kind == "recipe":
                values[field.name] = self.recipe
        try:
            return node.spec.cls(**values)
        except Exception as error:
            error.add_note(f"while building [{node.name}] ({node.spec.use}), {node.place}")
            raise

    def _edge(self, field: Field, edge: Edge) -> Any:
        objects = [self._objects[name] for name in edge.targets]
        match field.kind:
            case "one" | "optional":
                return objects[0]
            case "mapping":
                return dict(zip(edge.keys, objects, strict=True))
            case "ordered":
                return Ordered(objects, edge.targets)
        return objects

    def _fill(self, name: str) -> None:
        node = self.graph.nodes[name]
        for field in node.spec.fields.values():
            if field.kind == "every":
                kinds = {kind for kind in {type(item) for item in self._objects.values()} if _fits(kind, field.ports)}
                fitting = {key: item for key, item in self._objects.items() if type(item) in kinds}
                getattr(self._objects[name], field.name).fill(fitting)

    def __enter__(self) -> "Container":
        try:
            self.build()
            for name, item in self._objects.items():
                if name not in self.given and hasattr(item, "open"):
                    self._open_one(name, item)
                elif name not in self.given and hasattr(item, "close"):
                    self._open.append(name)
        except BaseException as error:
            self._close(error)
            raise
        return self

    def _open_one(self, name: str, item: Any) -> None:
        self._open.append(name)
        try:
            item.open()
        except UserError as error:
            error.stands_at(self.graph.nodes[name].place, name)
            raise

    def __exit__(self, _kind: type | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        self._close(error)

    def _close(self, cause: BaseException | None) -> None:
        """Close everything that was opened; failures become notes on the cause, or a group of their own."""
        failures: list[BaseException] = []
        while self._open:
            name = self._open.pop()
            try:
                getattr(self._objects[name], "close", lambda: None)()
            except BaseException as error:
                error.add_note(f"while closing [{name}]")
                failures.append(error)
        if cause is not None:
            for failure in failures:
                cause.add_note(f"then: {type(failure).__name__}: {failure} ({'; '.join(failure.__notes__)})")
        elif failures:
            raise BaseExceptionGroup("closing failed", failures)

    def __getitem__(self, name: str) -> Any:
        return self._objects[name]

    def __iter__(self) -> Any:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)


def _fits(cls: type, ports: Iterable[type]) -> bool:
    return any(not misfits(cls, port) for port in ports)
