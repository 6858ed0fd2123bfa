"""The container: builds each node once in dependency order, opens them, and closes them in reverse, whatever fails."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, TypeVar, overload

import attrs

from drawloom.graph.component import Every, Ordered
from drawloom.graph.garbage import paused_collection
from drawloom.graph.lifecycle import Stage
from drawloom.graph.problems import Problem, RecipeError, UserError, did_you_mean
from drawloom.graph.recipe.lockfile import ResolvedRecipe
from drawloom.graph.registry.spec import Field
from drawloom.graph.runtime.origin import place_of, raised_in
from drawloom.graph.types.port_match import implements, mismatches
from drawloom.graph.wiring.graph import Graph
from drawloom.graph.wiring.node import Edge, Node

STAGES: tuple[Stage, ...] = ("build", "open", "close")

T = TypeVar("T")

IMMUTABLE = (str, bool, int, float, type(None))
"""Types of most settings, which need no copy."""

LEAST = 0.001
"""Seconds; faster nodes share one line in the table of timings."""


class NodeTiming(NamedTuple):
    """How long a node took to build, open or close; `start` by the monotonic clock, both in seconds."""

    node: str
    stage: Stage
    start: float
    seconds: float


@attrs.define
class timed:
    """A context manager that measures its body, also if it raises."""

    timings: list[NodeTiming]
    node: str
    stage: Stage
    start: float = 0.0

    def __enter__(self) -> None:
        self.start = perf_counter()

    def __exit__(self, _kind: type | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.timings.append(NodeTiming(self.node, self.stage, self.start, perf_counter() - self.start))


def timing_table(timings: Sequence[NodeTiming]) -> str:
    """A table of nodes by stage in milliseconds, the slowest first; nodes faster than LEAST are summed in one line."""
    totals: dict[str, dict[Stage, float]] = {}
    for timing in timings:
        stages = totals.setdefault(timing.node, dict.fromkeys(STAGES, 0.0))
        stages[timing.stage] += timing.seconds
    slowest = sorted(totals.items(), key=lambda item: -sum(item[1].values()))
    rows = [(f"[{name}]", times) for name, times in slowest if sum(times.values()) >= LEAST]
    others = [times for _, times in slowest if sum(times.values()) < LEAST]
    if others:
        rows.append((f"{len(others)} others", _sum(others)))
    rows.append(("all", _sum(list(totals.values()))))
    width = max(len(name) for name, _ in rows)
    head = f"{'ms':{width}}{''.join(f'{stage:>10}' for stage in STAGES)}"
    return "\n".join([head, *(f"{name:{width}}{''.join(map(_milliseconds, times.values()))}" for name, times in rows)])


def _sum(rows: Sequence[Mapping[Stage, float]]) -> dict[Stage, float]:
    return {stage: sum(times[stage] for times in rows) for stage in STAGES}


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:10.1f}"


@attrs.define
class NamedExitStack:
    """Callbacks by name, run last in, first out. Unlike contextlib's ExitStack, it reports all failures by name."""

    _stack: list[tuple[str, Callable[[], None]]] = attrs.field(factory=list, init=False)

    def push(self, name: str, close: Callable[[], None]) -> None:
        """Add a callback, to run before all that were added earlier."""
        self._stack.append((name, close))

    def close_all(self, cause: BaseException | None) -> None:
        """
        Run every callback. With a `cause`, failures become notes on it, and the caller raises it.

        Without one, an interruption or exit raised while closing is raised as itself, with the other failures as
        notes; failures alone are raised together, as an ExceptionGroup.
        """
        failures: list[BaseException] = []
        while self._stack:
            name, close = self._stack.pop()
            try:
                close()
            except BaseException as error:  # an interruption, too, must not skip the other callbacks
                error.add_note(f"while closing [{name}]")
                failures.append(error)
        if cause is not None:
            return _note(cause, failures)
        interruption = next((error for error in failures if not isinstance(error, Exception)), None)
        if interruption is not None:
            _note(interruption, [failure for failure in failures if failure is not interruption])
            raise interruption
        if failures:
            raise ExceptionGroup("closing failed", [error for error in failures if isinstance(error, Exception)])


def _note(cause: BaseException, failures: list[BaseException]) -> None:
    for failure in failures:
        cause.add_note(f"then: {type(failure).__name__}: {failure} ({'; '.join(failure.__notes__)})")


@attrs.define(eq=False, repr=False)
class Container(Mapping[str, Any]):
    """
    The objects of the nodes that `roots` need, by node name.

    `build` constructs them, which is cheap; as a context manager the container also opens those with `open()`, in
    order, and closes those with `close()`, in reverse. `given` are objects that replace nodes: checked like nodes, but
    neither opened nor closed; None leaves out a node that only optional edges lead to.

    When something fails, `on_failure(error)` of the open objects that have it is called before any is closed, and may
    return another exception to raise instead. Each open() and close() is called in the contexts that
    `stage_context(stage, node)` of the open objects that have it returns.
    """

    graph: Graph
    roots: list[str]
    recipe: ResolvedRecipe
    given: Mapping[str, Any] = attrs.field(factory=dict)
    timings: list[NodeTiming] = attrs.field(factory=list, init=False)
    _objects: dict[str, Any] = attrs.field(factory=dict, init=False)
    _opened: NamedExitStack = attrs.field(factory=NamedExitStack, init=False)
    _failure_handlers: list[str] = attrs.field(factory=list, init=False)
    _watchers: list[str] = attrs.field(init=False, factory=list)

    @paused_collection()
    def build(self) -> None:
        """Construct every needed node once, dependencies first; then fill the `Every` fields."""
        self._objects = {}
        # What only a given object would need is not built.
        needed = self.graph.topological_order(self.roots, without=self.given)
        self._check_given(set(needed) - self.given.keys())
        began = perf_counter()
        for name in needed:
            if name in self.given:
                self._objects[name] = self.given[name]
            else:
                self._objects[name] = self._construct(self.graph.nodes[name])
                ended = perf_counter()
                self.timings.append(NodeTiming(name, "build", began, ended - began))
                began = ended
        self._fill_all()

    def check_machine(self) -> list[Problem]:
        """
        Return what this machine lacks, by the built nodes: each problem at the setting that names a file or a device.

        A problem is reported by the node that has it, and not by others that read from this node.
        """
        problems: dict[str, Problem] = {}
        checked = {name: item for name, item in self._built.items() if hasattr(item, "check_machine")}
        for name, item in checked.items():
            try:
                item.check_machine()
            except UserError as error:
                if raised_in(error, checked, name) == name:
                    place = place_of(self.graph.nodes[name], str(error), self.graph.recipe.vars)
                    problems[name] = Problem("DL403", str(error), node=name, place=place)
            except Exception:
                if not problems.keys() & {*self.graph.topological_order([name])}:
                    raise  # a bug, and not a consequence of what a node that it needs could not read
        return list(problems.values())

    def _check_given(self, users: Set[str]) -> None:
        """Raise ValueError or TypeError if an object can't be the node that it is given for, for one of its users."""
        for name, item in self.given.items():
            if name not in self.graph.nodes:
                raise ValueError(f"there is no node {name!r} to give; {did_you_mean(name, self.graph.nodes)}")
            for user, key in [(user, key) for user, keys in self.graph.incoming(name) for key in keys]:
                if user in users:
                    field = self.graph.nodes[user].spec.fields[key]
                    ports = field.ports
                    if item is None and field.kind == "optional":
                        continue
                    if not _fits(type(item), ports):
                        why = " and ".join(reason for port in ports for reason in mismatches(type(item), port))
                        raise TypeError(f"the object given for [{name}] does not implement [{user}] {key}: it {why}")

    def _construct(self, node: Node) -> Any:
        # Copied, since a container may be built again from the same graph and a component may change its settings.
        values = {
            name: value if type(value) in IMMUTABLE else copy.deepcopy(value) for name, value in node.settings.items()
        }
        for key, edge in node.edges.items():
            values[key] = self._edge(node.spec.fields[key], edge)
        for field in node.spec.every_fields:
            values[field.name] = Every()
        for field in node.spec.recipe_fields:
            values[field.name] = self.recipe
        try:
            return node.spec.cls(**values)
        except Exception as error:
            error.add_note(f"while building [{node.name}] ({node.spec.use}), {node.place}")
            raise

    def _edge(self, field: Field, edge: Edge) -> Any:
        if field.kind in ("one", "optional"):
            return self._objects[edge.targets[0]]
        objects = [self._objects[name] for name in edge.targets]
        match field.kind:
            case "mapping":
                return dict(zip(edge.keys, objects, strict=True))
            case "ordered":
                return Ordered(objects, edge.targets)
        return objects

    def _fill_all(self) -> None:
        # By class, not by object: matching a class with a port is slow, and many nodes share a class.
        kinds = {type(item) for item in self._objects.values()}
        nodes = [self.graph.nodes[name] for name in self._objects if name not in self.given]
        for node in [node for node in nodes if node.spec.every_fields]:
            for field in node.spec.every_fields:
                fitting = {kind for kind in kinds if _fits(kind, field.ports)}
                members = {key: item for key, item in self._objects.items() if type(item) in fitting}
                getattr(self._objects[node.name], field.attribute).update(members)

    def __enter__(self) -> "Container":
        try:
            self.build()
            if problems := self.check_machine():
                raise RecipeError(problems)
            for name, item in self._objects.items():
                if name not in self.given:
                    self._open(name, item)
        except BaseException as error:
            self._fail(error)
            raise
        return self

    def _open(self, name: str, item: Any) -> None:
        if hasattr(item, "on_failure"):
            self._failure_handlers.append(name)
        # Before open(): an object whose open() fails half-way must still release what it has.
        if hasattr(item, "close"):
            self._opened.push(name, lambda: self._close(name, item))
        if hasattr(item, "open"):
            try:
                with timed(self.timings, name, "open"), self._in_contexts("open", name):
                    item.open()
            except UserError as error:  # printed without traceback, so the message must name the node
                node = self.graph.nodes[raised_in(error, self._built, name)]
                error.set_node(place_of(node, str(error), self.graph.recipe.vars), node.name)
                raise
        if hasattr(item, "stage_context"):
            self._watchers.append(name)

    @contextmanager
    def _in_contexts(self, stage: Stage, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for watcher in self._watchers:
                stack.enter_context(self._objects[watcher].stage_context(stage, name))
            yield

    @property
    def _built(self) -> dict[str, Any]:
        """The objects that are not given, and so have a place in the recipe."""
        return {name: item for name, item in self._objects.items() if name not in self.given}

    def _close(self, name: str, item: Any) -> None:
        if name in self._watchers:
            self._watchers.remove(name)
        with timed(self.timings, name, "close"), self._in_contexts("close", name):
            item.close()

    def __exit__(self, _kind: type | None, error: BaseException | None, _trace: TracebackType | None) -> None:
        if error is None:
            self._opened.close_all(None)
        else:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Call the failure handlers, last opened first, and close everything. Raises a replacement, if any."""
        replacement = error
        is_bug = isinstance(error, Exception) and not isinstance(error, UserError)
        if is_bug and (name := raised_in(error, self._built)):
            node = self.graph.nodes[name]
            error.add_note(f"in [{name}] ({node.spec.use}), {node.place}")
        # Popped first: a handler that raises must not be called again.
        while self._failure_handlers:
            replacement = self._objects[self._failure_handlers.pop()].on_failure(replacement) or replacement
        self._opened.close_all(replacement)
        if replacement is not error:
            raise replacement from error

    def __getitem__(self, name: str) -> Any:
        if name not in self._objects:
            hint = did_you_mean(name, self._objects)
            text = f"no open node is called {name!r}; {hint}".rstrip("; ")
            raise KeyError(text if self._objects else "nothing is open; write `with recipe.open() as run:`")
        return self._objects[name]

    def __repr__(self) -> str:
        return f"<Container of {len(self)} open nodes for {', '.join(f'[{name}]' for name in self.roots)}>"

    @overload
    def get(self, wanted: Callable[..., T]) -> T: ...
    @overload
    def get(self, wanted: str, default: Any = None) -> Any: ...
    def get(self, wanted: Any, default: Any = None) -> Any:
        """
        The one object of a class or port, with that type; or, as of any mapping, the object of a node by name.

        Raises LookupError if no object or several implement the port.
        """
        # The type is that of a function that makes a T: type checkers refuse Protocols for type[T].
        if isinstance(wanted, str):
            return self._objects.get(wanted, default)
        names = [name for name, item in self._objects.items() if _fits(type(item), (wanted,))]
        if len(names) != 1:
            found = " and ".join(f"[{name}]" for name in names) or "no open node"
            raise LookupError(f'{found} {"are" if names[1:] else "is"} a {wanted.__name__}; name a node: run["name"]')
        return self._objects[names[0]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._objects)

    def __len__(self) -> int:
        return len(self._objects)


def _fits(cls: type, ports: Iterable[type]) -> bool:
    return any(implements(cls, port) for port in ports)
