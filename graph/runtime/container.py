"""
The container: builds every node once in dependency order, and asks the nodes about this machine.

An exception is reported with its node, and with the position of the setting behind it. Opening and closing nodes is in
`opened.py`.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Set
from time import perf_counter
from types import TracebackType
from typing import Any, TypeVar, overload

import attrs

from drawloom.graph.component import Every, Ordered, internal
from drawloom.graph.garbage import pause_garbage_collection
from drawloom.graph.lifecycle import NodeTiming
from drawloom.graph.problems import Problem, RecipeError, UserError, did_you_mean
from drawloom.graph.recipe.lockfile import ResolvedRecipe
from drawloom.graph.registry.registry import Field
from drawloom.graph.types.port_match import find_mismatches, implements_any, join_mismatches
from drawloom.graph.wiring.graph import Graph
from drawloom.graph.wiring.node import Edge, Node

T = TypeVar("T")

IMMUTABLE = (str, bool, int, float, type(None))
"""Immutable types of settings, which need no copy."""


@attrs.define(eq=False, repr=False)
class Container(Mapping[str, Any]):
    """
    The objects of `roots` and their dependencies, by node name.

    `build` constructs them cheaply. As a context manager the container also calls `open()` in dependency order and
    `close()` in reverse order, on objects with these methods. `replacements` are objects for some nodes. They are
    checked like nodes, but neither opened nor closed. None leaves out a node reached only by optional edges.

    After a failure, the container calls `on_failure` of open objects before it closes any object; they
    may return another exception to raise instead. If it is a ReopenError, nodes hand values over to their successors
    (`hand_over`), and the next container passes them on (`take_over`) before it opens a node.
    The container enters the contexts from `lifecycle_context` of all other objects, open or not,
    around every open() and close().
    """

    graph: Graph
    roots: list[str]
    recipe: ResolvedRecipe
    replacements: Mapping[str, Any] = attrs.field(factory=dict)
    handed_over: Mapping[str, Any] = attrs.field(factory=dict)
    timings: list[NodeTiming] = attrs.field(factory=list, init=False)
    _objects: dict[str, Any] = attrs.field(factory=dict, init=False)
    _built: dict[str, Any] = attrs.field(factory=dict, init=False)  # without replacements
    _opened: Any = internal(None)

    @pause_garbage_collection()
    def build(self) -> None:
        """Construct every needed node once, dependencies first, and then fill the `Every` fields."""
        self._objects.clear()
        self._built.clear()
        # Nodes that only replaced nodes need are not built.
        needed = self.graph.topological_order(self.roots, without=self.replacements)
        self._check_replacements(set(needed) - self.replacements.keys())
        start = perf_counter()
        for name in needed:
            if name in self.replacements:
                self._objects[name] = self.replacements[name]
            else:
                self._objects[name] = self._built[name] = self._construct_node(self.graph.nodes[name])
                end = perf_counter()
                self.timings.append(NodeTiming(name, "build", start, end - start))
                start = end
        self._fill_every_fields()

    def steps(self) -> Iterator[Any]:
        """
        Run the root node, and yield every step after its phases. Raises TypeError if the root has no steps.

            with recipe.open() as run:
                for step in run.steps():
                    losses.append(step.state.number("loss"))
        """
        root = self._built.get(self.graph.root)
        if root is None or not hasattr(root, "run_and_yield_steps"):
            raise TypeError(f"[{self.graph.root}] has no method `run_and_yield_steps`, or this container is not open")
        steps: Iterator[Any] = root.run_and_yield_steps()
        return steps

    def outcome(self) -> dict[str, Mapping[str, Any]]:
        """Return facts about an ended run, by node."""
        return {name: item.outcome() for name, item in self._built.items() if hasattr(item, "outcome")}

    def check_before_open(self) -> list[Problem]:
        """
        Return problems with files and devices that this machine lacks, each at the setting that names the file or
        device.

        Every problem is reported once, by the faulty node, and not by nodes reading from it.
        """
        problems: dict[str, Problem] = {}
        checkable = {name: item for name, item in self._built.items() if hasattr(item, "check_before_open")}
        for name, item in checkable.items():
            try:
                item.check_before_open()
            except UserError as error:
                from drawloom.graph.runtime.faults import find_raising_node, locate_setting  # rarely needed

                if find_raising_node(error, checkable, name) == name:
                    position = locate_setting(self.graph.nodes[name], str(error), self.graph.recipe.vars)
                    problems[name] = Problem("DL403", str(error), node=name, position=position)
            except Exception:
                if not problems.keys() & {*self.graph.topological_order([name])}:
                    raise  # a bug, not a consequence of a problem of a node it needs
        return list(problems.values())

    def _check_replacements(self, users: Set[str]) -> None:
        """
        Raise ValueError for an unknown node, or TypeError if a replacement does not implement a port of its users.
        """
        for name, item in self.replacements.items():
            if name not in self.graph.nodes:
                raise ValueError(f"there is no node {name!r} to replace; {did_you_mean(name, self.graph.nodes)}")
            for user, key in [
                (user, key) for user, keys in self.graph.list_users_with_edge_names(name) for key in keys
            ]:
                if user in users:
                    field = self.graph.nodes[user].spec.fields[key]
                    ports = field.ports
                    if item is None and field.kind in ("optional", "list"):
                        continue
                    if not implements_any(type(item), ports):
                        why = join_mismatches(
                            [reason for port in ports for reason in find_mismatches(type(item), port)]
                        )
                        raise TypeError(
                            f"the replacement for [{name}] does not implement the port of [{user}] {key}: it {why}"
                        )

    def _construct_node(self, node: Node) -> Any:
        # Copied: components may change their settings, and another container may be built from the same graph.
        values = {
            name: value if type(value) in IMMUTABLE else copy.deepcopy(value) for name, value in node.settings.items()
        }
        for key, edge in node.edges.items():
            values[key] = self._make_edge_value(node.spec.fields[key], edge)
        for field in node.spec.fields_of_kind_every:
            values[field.name] = Every()
        for field in node.spec.fields_of_kind_recipe:
            values[field.name] = self.recipe
        try:
            return node.spec.cls(**values)
        except Exception as error:
            error.add_note(f"while building [{node.name}] ({node.spec.use}), {node.position}")
            raise

    def _make_edge_value(self, field: Field, edge: Edge) -> Any:
        """Return an edge's built objects as its field expects them: one object, a list, a dict or an Ordered."""
        if field.kind in ("one", "optional"):
            return self._objects[edge.targets[0]]
        objects = [self._objects[name] for name in edge.targets]
        match field.kind:
            case "list":  # without nodes that were replaced by None
                return [item for item in objects if item is not None]
            case "mapping":
                return dict(zip(edge.keys, objects, strict=True))
            case "ordered":
                return Ordered(objects, edge.targets)
        return objects

    def _fill_every_fields(self) -> None:
        """Fill every `Every` field with all objects implementing its port."""
        # Matched by class: matching a class with a port is slow, and many nodes share a class.
        kinds = {type(item) for item in self._objects.values()}
        nodes = [self.graph.nodes[name] for name in self._objects if name not in self.replacements]
        for node in [node for node in nodes if node.spec.fields_of_kind_every]:
            for field in node.spec.fields_of_kind_every:
                fitting = {kind for kind in kinds if implements_any(kind, field.ports)}
                members = {key: item for key, item in self._objects.items() if type(item) in fitting}
                getattr(self._objects[node.name], field.attribute).update(members)

    def __enter__(self) -> "Container":
        from drawloom.graph.runtime.opened import OpenedNodes  # a check opens nothing

        self._opened = OpenedNodes(self.graph, self._built, self.timings)
        try:
            self.build()
            if problems := self.check_before_open():
                raise RecipeError(problems)
            self._opened.open_all(self.handed_over)
            self.handed_over = {}  # the values may be large
        except BaseException as error:
            self._opened.close_all(error)
            raise
        return self

    def __exit__(self, _kind: type | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        self._opened.close_all(error)

    def __getitem__(self, name: str) -> Any:
        if name not in self._objects:
            hint = did_you_mean(name, self._objects)
            text = f"no open node is called {name!r}; {hint}".rstrip("; ")
            raise KeyError(text if self._objects else "nothing is open; write `with recipe.open() as run:`")
        return self._objects[name]

    def __repr__(self) -> str:
        return f"<Container of {len(self)} open nodes for {', '.join(f'[{name}]' for name in self.roots)}>"

    @overload
    def get(self, key: Callable[..., T]) -> T: ...
    @overload
    def get(self, key: str, default: Any = None) -> Any: ...
    def get(self, key: Any, default: Any = None) -> Any:
        """
        Return the only object implementing a class or port, typed as such, or a node's object by name.

        Raises LookupError if no object or several objects implement the port. Names work as in any mapping.
        """
        # Typed as a function that makes a T, because type checkers refuse Protocols for type[T].
        if isinstance(key, str):
            return self._objects.get(key, default)
        names = [name for name, item in self._objects.items() if implements_any(type(item), (key,))]
        if len(names) != 1:
            implementers = " and ".join(f"[{name}]" for name in names) or "no open node"
            verb = "implement" if names[1:] else "implements"
            raise LookupError(f'{implementers} {verb} {key.__name__}; get a node by name: run["name"]')
        return self._objects[names[0]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)
