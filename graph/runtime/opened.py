"""Opens built nodes in dependency order, and closes them in reverse order, also after a failure."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import Any

import attrs

from drawloom.graph.component import internal
from drawloom.graph.lifecycle import LifecycleStage, NodeTiming
from drawloom.graph.problems import ReopenError, UserError
from drawloom.graph.wiring.graph import Graph


@contextmanager
def time_lifecycle(timings: list[NodeTiming], node: str, stage: LifecycleStage) -> Iterator[None]:
    """Record the duration of the context, even if it raises."""
    start = perf_counter()
    try:
        yield
    finally:
        timings.append(NodeTiming(node, stage, start, perf_counter() - start))


@attrs.define
class NamedExitStack:
    """
    Stack of named callbacks, run last in, first out. Unlike contextlib's ExitStack, it reports all failures by name.
    """

    _stack: list[tuple[str, Callable[[], None]]] = attrs.field(factory=list, init=False)

    def push_callback(self, name: str, close: Callable[[], None]) -> None:
        """Add a callback to run before all earlier ones."""
        self._stack.append((name, close))

    def close_all(self, cause: BaseException | None) -> None:
        """
        Run every callback. With a `cause`, failures become notes on it, and the caller raises it.

        Without a cause, raise an interruption or exit from a callback itself, with the other failures as notes. Raise
        failures without an interruption together, as an ExceptionGroup.
        """
        failures: list[BaseException] = []
        while self._stack:
            name, close = self._stack.pop()
            try:
                close()
            except BaseException as error:  # even an interruption must not skip the other callbacks
                error.add_note(f"while closing [{name}]")
                failures.append(error)
        if cause is not None:
            return _attach_failures_as_notes(cause, failures)
        interruption = next((error for error in failures if not isinstance(error, Exception)), None)
        if interruption is not None:
            _attach_failures_as_notes(interruption, [failure for failure in failures if failure is not interruption])
            raise interruption
        if failures:
            raise ExceptionGroup("closing failed", [error for error in failures if isinstance(error, Exception)])


def _attach_failures_as_notes(cause: BaseException, failures: list[BaseException]) -> None:
    for failure in failures:
        cause.add_note(f"then: {type(failure).__name__}: {failure} ({'; '.join(failure.__notes__)})")


@attrs.define(eq=False)
class OpenedNodes:
    """Lifecycle for a container's nodes, `objects` by name, dependencies first; see `Container`."""

    graph: Graph
    objects: Mapping[str, Any]
    timings: list[NodeTiming]
    _opened: NamedExitStack = internal(factory=NamedExitStack)
    _failure_handlers: list[str] = internal(factory=list)
    _watchers: list[str] = internal(factory=list)

    def open_all(self, handed_over: Mapping[str, Any]) -> None:
        """Pass on the failed container's values, and open all objects."""
        for name, values in handed_over.items():
            if hasattr(self.objects[name], "take_over"):
                self.objects[name].take_over(values)
        self._watchers = [name for name, item in self.objects.items() if hasattr(item, "lifecycle_context")]
        for name, item in self.objects.items():
            self._open_node(name, item)

    def _open_node(self, name: str, item: Any) -> None:
        if hasattr(item, "on_failure"):
            self._failure_handlers.append(name)
        # Pushed before open(): an object whose open() fails half-way must still release its resources.
        if hasattr(item, "close"):
            self._opened.push_callback(name, lambda: self._close_node(name, item))
        if hasattr(item, "open"):
            try:
                with time_lifecycle(self.timings, name, "open"), self._enter_lifecycle_contexts("open", name):
                    item.open()
            except UserError as error:  # printed without a traceback, so the message must name the node
                from drawloom.graph.runtime.faults import find_raising_node, locate_setting

                node = self.graph.nodes[find_raising_node(error, self.objects, name)]
                error.add_node_to_message(locate_setting(node, str(error), self.graph.recipe.vars), node.name)
                raise

    @contextmanager
    def _enter_lifecycle_contexts(self, stage: LifecycleStage, name: str) -> Iterator[None]:
        with ExitStack() as stack:
            for watcher in self._watchers:
                if watcher != name:
                    stack.enter_context(self.objects[watcher].lifecycle_context(stage, name))
            yield

    def _close_node(self, name: str, item: Any) -> None:
        with time_lifecycle(self.timings, name, "close"), self._enter_lifecycle_contexts("close", name):
            item.close()

    def close_all(self, error: BaseException | None) -> None:
        """
        Close everything. After an error, call the failure handlers before, last opened first, and raise the replacement
        exception, if any.
        """
        replacement = error
        if isinstance(error, Exception) and not isinstance(error, UserError):  # a bug
            from drawloom.graph.runtime.faults import find_raising_node

            if name := find_raising_node(error, self.objects):
                node = self.graph.nodes[name]
                error.add_note(f"in [{name}] ({node.spec.use}), {node.position}")
        # Popped first: a handler that raises must not be called again.
        while error is not None and self._failure_handlers:
            replacement = self.objects[self._failure_handlers.pop()].on_failure(replacement) or replacement
        if isinstance(replacement, ReopenError):
            predecessors = {name: item for name, item in self.objects.items() if hasattr(item, "hand_over")}
            replacement.handed_over = {name: item.hand_over() for name, item in predecessors.items()}
        try:
            self._opened.close_all(replacement)
        finally:
            # Empty the `Every` fields: without them nodes make no cycles.
            for name in self.objects:
                for field in self.graph.nodes[name].spec.fields_of_kind_every:
                    getattr(self.objects[name], field.attribute).clear()
        if replacement is not None and replacement is not error:
            raise replacement from error
