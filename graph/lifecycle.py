"""Optional methods of components, whatever their ports: the container, `check` and other commands call them."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from drawloom.graph.component import Impact
from drawloom.graph.problems import Problem

LifecycleStage = Literal["build", "open", "close"]
"""A stage in the life of a built object."""


class NodeTiming(NamedTuple):
    """Time in seconds for building, opening or closing a node. `start` is a reading of the monotonic clock."""

    node: str
    stage: LifecycleStage
    start: float
    seconds: float


@runtime_checkable
class Openable(Protocol):
    """A component with work to do before its use, such as reading files."""

    def open(self) -> None:
        """Read files, start processes, allocate memory; called after all nodes of its edges are open."""


@runtime_checkable
class Constrained(Protocol):
    """A component class with constraints on several settings, or on settings of neighbours."""

    @classmethod
    def constraints(cls, node: Any) -> Iterator[Problem]:
        """Yield the problems of a node, which is a NodeView, before anything is built."""


@runtime_checkable
class OptionalMethods(Protocol):
    """Further methods that a component may have, each alone; they are looked up by their names."""

    def close(self) -> None:
        """Release all resources."""

    def on_failure(self, error: BaseException) -> BaseException | None:
        """Handle the exception, and return an exception to raise in its place, or None."""

    def hand_over(self) -> Any:
        """Return values for this node in the next attempt; called on an open component, before it is closed."""

    def take_over(self, values: Any) -> None:
        """Receive the result from `hand_over` in the failed attempt, before the first node is opened."""

    def lifecycle_context(self, stage: LifecycleStage, node: str) -> AbstractContextManager[None]:
        """Return a context for opening or closing a node."""

    def check_before_open(self) -> None:
        """
        Raise UserError if this machine lacks a file or device of the settings.

        Called before the first node is opened; it reads little, leaves nothing open, and uses other nodes only as they
        are before `open`.
        """

    def preview(self) -> str:
        """Return a text for `run --dry-run`; the component is open."""

    def run_and_yield_steps(self) -> Iterator[Any]:
        """Run, and yield every step when it has ended."""

    def outcome(self) -> Mapping[str, Any]:
        """Return facts about the ended run as data for JSON; called on an open component."""

    @classmethod
    def notes(cls, node: Any) -> Iterable[str]:
        """Yield lines about a node for `explain`, and for `draw` with the focus on the node."""

    @classmethod
    def resume_impact(cls, node: Any, key: str, before: Any) -> Impact | tuple[Impact, str] | None:
        """
        Return how a changed `key` affects a resumed run, with or without a reason; None: as its setting declares.

        `node` has the new value; `before` is the old one as in TOML, None if it is unknown.
        """

    @classmethod
    def settings_to_stay_in_folder(
        cls, settings: Mapping[str, Any], explicit_keys: Collection[str], folder: str
    ) -> Mapping[str, Any]:
        """Return settings for a run in `folder`; overlays or the command line set `explicit_keys`."""
