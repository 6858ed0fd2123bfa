"""Living objects: built once each in order, opened, handed out, closed in reverse whatever happens."""

import copy
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, datetime, time
from pathlib import Path, PosixPath
from time import perf_counter
from types import NoneType, TracebackType
from typing import Any

import attrs

from drawloom.graph.build.graph import Graph
from drawloom.graph.build.node import Edge, Node
from drawloom.graph.port import Every, Ordered
from drawloom.graph.problems import UserError
from drawloom.graph.recipe.lockfile import ResolvedRecipe
from drawloom.graph.registry.spec import Field
from drawloom.graph.runtime.exit_stack import NamedExitStack
from drawloom.graph.runtime.timings import Timing, timed
from drawloom.graph.toml.suggest import did_you_mean
from drawloom.graph.types.port_match import implements, mismatches

UNCHANGING = {NoneType, bool, int, float, str, date, datetime, time, Path, PosixPath}
"""Types of values that two objects may share."""


@attrs.define(eq=False)
class Container(Mapping[str, Any]):
    """
    The objects of a graph's nodes, those that `roots` need.

    `build` constructs, which costs little; as a context manager it also opens what has `open()`, in order, and closes
    what has `close()`, in reverse. When something fails, what is open and has `on_failure(error)` is told before
    anything is closed, and may give another exception to raise in its place. `given` are objects to use in place of
    nodes: they are checked like nodes, but neither opened nor closed. `spans` says how long each node took.
    """

    graph: Graph
    roots: list[str]
    recipe: ResolvedRecipe
    given: Mapping[str, Any] = attrs.field(factory=dict)
    spans: list[Timing] = attrs.field(factory=list, init=False)
    _objects: dict[str, Any] = attrs.field(factory=dict, init=False)
    _opened: NamedExitStack = attrs.field(factory=NamedExitStack, init=False)
    _told: list[str] = attrs.field(factory=list, init=False)

    def build(self) -> None:
        """Construct every needed node once, then fill in what takes every node of a kind."""
        self._check_given()
        self._objects = {}
        for name in self.graph.topological_order(self.roots, without=self.given):
            if name in self.given:
                self._objects[name] = self.given[name]
            else:
                start = perf_counter()
                self._objects[name] = self._construct(self.graph.nodes[name])
                self.spans.append(Timing(name, "build", start, perf_counter() - start))
        self._fill_all()

    def _check_given(self) -> None:
        for name, item in self.given.items():
            if name not in self.graph.nodes:
                raise ValueError(f"there is no node {name!r} to give; {did_you_mean(name, self.graph.nodes)}")
            for user, keys in self.graph.incoming(name):
                for key in keys:
                    ports = self.graph.nodes[user].spec.fields[key].ports
                    if not _fits(type(item), ports):
                        why = " and ".join(reason for port in ports for reason in mismatches(type(item), port))
                        raise TypeError(f"what is given for [{name}] does not fit [{user}] {key}: it {why}")

    def _construct(self, node: Node) -> Any:
        values = {key: _own(value) for key, value in node.settings.items()}
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

    def _fill_all(self) -> None:
        kinds = {type(item) for item in self._objects.values()}
        for name in self._objects.keys() - self.given.keys():
            for field in self.graph.nodes[name].spec.every_fields:
                fitting = {kind for kind in kinds if _fits(kind, field.ports)}
                members = {key: item for key, item in self._objects.items() if type(item) in fitting}
                getattr(self._objects[name], field.attribute).fill(members)

    def __enter__(self) -> "Container":
        try:
            self.build()
            for name, item in self._objects.items():
                if name not in self.given:
                    self._open(name, item)
        except BaseException as error:
            self._fail(error)
            raise
        return self

    def _open(self, name: str, item: Any) -> None:
        if hasattr(item, "on_failure"):
            self._told.append(name)
        if hasattr(item, "close"):
            self._opened.push(name, lambda: self._close(name, item))
        if hasattr(item, "open"):
            try:
                with timed(self.spans, name, "open"):
                    item.open()
            except UserError as error:
                error.stands_at(self.graph.nodes[name].place, name)
                raise

    def _close(self, name: str, item: Any) -> None:
        with timed(self.spans, name, "close"):
            item.close()

    def __exit__(self, _kind: type | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if error is None:
            self._opened.close_all(None)
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Close everything. It raises what is to be raised in the error's place, if there is such a thing."""
        instead = error
        while self._told:
            instead = self._objects[self._told.pop()].on_failure(instead) or instead
        self._opened.close_all(instead)
        if instead is not error:
            raise instead from error

    def __getitem__(self, name: str) -> Any:
        return self._objects[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)


def _own(value: Any) -> Any:
    """A setting's value for one object alone, which may change it."""
    return value if type(value) in UNCHANGING else copy.deepcopy(value)


def _fits(cls: type, ports: Iterable[type]) -> bool:
    return any(implements(cls, port) for port in ports)
