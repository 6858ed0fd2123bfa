"""Timeouts for collectives and steps, longer for the first step and for saving; a hanging process exits."""

from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, get_args

from drawloom import above, component, setting
from drawloom.ports import Event, EventKind, Mesh, Processes, RunFolder

if TYPE_CHECKING:
    from drawloom.components.listeners.time_limits import TimeLimits


@component(impact="safe")
class Timeouts:
    """
    Timeouts for collectives and whole steps, in every stage of the run.

    A timed-out collective raises an error that names the awaited rank. A process that exceeds the limit by two
    seconds hangs elsewhere: it reports its step, its phase and the hang diagnosis, dumps its threads'
    stacks to its log, and exits with code 1. The guard kills a process that can't exit, because C code holds the GIL.

    A component has `opening` seconds to open or close, and the time starts again after every logged message.
    Components that open before this one, and close after it, are ended by the guard alone, without the watchdog.
    """

    processes: Processes
    folder: RunFolder
    mesh: Mesh
    first_step: float = setting(
        "seconds for a process's first step, which compiles and connects", default=1800.0, check=above(0)
    )
    step: float = setting("seconds for every later step", default=600.0, check=above(0))
    saving: float = setting(
        "seconds for saving, and for the final tasks after the last step", default=1800.0, check=above(0)
    )

    opening: float = setting(
        "seconds for a component to open or close, counted from its last log message", default=1800.0, check=above(0)
    )

    observes: ClassVar[tuple[EventKind, ...]] = tuple(kind for kind in get_args(EventKind) if kind != "data_loaded")

    @cached_property
    def limits(self) -> "TimeLimits":
        """The limits for the run's parts."""
        from drawloom.components.listeners.time_limits import TimeLimits

        return TimeLimits(
            processes=self.processes,
            folder=self.folder,
            mesh=self.mesh,
            first_step=self.first_step,
            step=self.step,
            saving=self.saving,
            opening=self.opening,
        )

    def open(self) -> None:
        """Start the watchdog, without a limit yet."""
        self.limits.start_watchdog()

    def close(self) -> None:
        """Stop the watchdog, and lift the guard's time limit."""
        self.limits.stop_watchdog()

    def lifecycle_context(self, stage: str, node: str) -> AbstractContextManager[None]:
        """Limit the time for opening or closing a node."""
        return self.limits.limit_stage(stage, node)

    def on_event(self, event: Event) -> None:
        """Set the time limit for the run's next part."""
        self.limits.limit_next_part(event)
