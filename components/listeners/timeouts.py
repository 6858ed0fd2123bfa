"""Timeouts for collectives and steps, longer for the first step and for saving; a hanging process exits."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar, get_args

from drawloom import above, component, internal, setting
from drawloom.ports import Event, EventKind, Mesh, Processes, RunFolder

if TYPE_CHECKING:
    from drawloom.components.listeners.watchdog import Watchdog

log = logging.getLogger("drawloom.run")

WATCHDOG_MARGIN = 2.0  # seconds after the collective timeout, so that a blocked rank raises its own error first
GUARD_MARGIN = 10.0  # seconds after the watchdog, so that its report is complete when the guard kills this process
SLOW_OPENING = 30.0  # seconds until a warning names a component that opens or closes
BEFORE = "before the first step"


class _SignOfLife(logging.Handler):
    """Handler that calls a function for every log message, except this module's."""

    def __init__(self, call: Callable[[], None]) -> None:
        super().__init__()
        self._call = call

    def emit(self, record: logging.LogRecord) -> None:
        """Call the function, unless the message is from this module."""
        if record.module != log_module:
            self._call()


log_module = "timeouts"  # its warning of a slow component does not show that the component makes progress


@component(impact="safe")
class Timeouts:
    """
    Timeouts for collectives and whole steps, in every stage of the run.

    A timed-out collective raises an error that names the awaited rank. A process that exceeds the limit by
    WATCHDOG_MARGIN hangs elsewhere: it reports its step, its phase and the hang diagnosis, dumps its threads'
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

    exit: Callable[[int], object] = internal(os._exit)
    tick: float = internal(0.5)
    watchdog_margin: float = internal(WATCHDOG_MARGIN)
    _watchdog: "Watchdog | None" = internal(None)
    _stepped: bool = internal(False)
    _where: str = internal(BEFORE)
    _phase: str = internal("")
    _allowed: float = internal(0.0)
    _slow_after: float = internal(0.0)

    def open(self) -> None:
        """Start the watchdog, without a limit yet."""
        from drawloom.components.listeners.watchdog import Watchdog

        self._watchdog = Watchdog(self._report_and_exit, self.tick, on_slow=self._warn_slow)
        self._watchdog.start()

    def close(self) -> None:
        """Stop the watchdog, and lift the guard's time limit."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        set_guard_limit(None)

    @contextmanager
    def lifecycle_context(self, stage: str, node: str) -> Iterator[None]:
        """Limit the time for opening or closing a node."""
        before, phase = self._where, self._phase
        self._where, self._phase = f"{stage}() of [{node}]", ""
        self.processes.record_step_and_phase(self._where)
        handler = _SignOfLife(self._start_open_or_close_limit)
        logging.getLogger("drawloom").addHandler(handler)
        self._start_open_or_close_limit()
        try:
            yield
        finally:
            logging.getLogger("drawloom").removeHandler(handler)
            self._where, self._phase = before, phase
            self.processes.record_step_and_phase("" if before == BEFORE else self._describe_step_and_phase())
            self._limit_watchdog_and_guard(None)

    def _start_open_or_close_limit(self) -> None:
        """Start the limit for opening or closing a component."""
        self._limit_watchdog_and_guard(self.opening, warn_after_seconds=min(self.opening / 2, SLOW_OPENING))

    def on_event(self, event: Event) -> None:
        """Set the time limit for the run's next part."""
        try:
            # Note the event's step and phase for messages, also for other ranks' diagnosis
            if event.step is not None:
                self._where = f"step {event.step.index}"
            if event.kind in ("phase_started", "phase_ended"):
                self._phase = event.phase if event.kind == "phase_started" else ""
            self.processes.record_step_and_phase(self._describe_step_and_phase())
            match event.kind:
                case "run_started":
                    self._limit_collectives_and_step(self.first_step)
                case "step_started":
                    self._limit_watchdog_and_guard(self._next_step_limit_seconds())
                case "step_ended" if event.step:
                    # Limit the time until the next step, or for the final tasks after the last step
                    first, self._stepped = not self._stepped, True
                    if event.step.is_last:
                        self._where = "after the last step"
                        self._limit_collectives_and_step(self.saving)
                    elif first:
                        self._limit_collectives_and_step(self.step)
                case "saving_started":
                    self._limit_collectives_and_step(self.saving)
                case "saving_ended":
                    self._limit_collectives_and_step(self._next_step_limit_seconds())
                case "run_ended":
                    self._limit_watchdog_and_guard(None)
        except Exception:
            # the dispatcher drops this listener: without further events, an active limit would end a healthy run
            self._limit_watchdog_and_guard(None)
            raise

    def _describe_step_and_phase(self) -> str:
        """Return the current step and phase as text."""
        return f"{self._where}, phase [{self._phase}]" if self._phase else self._where

    def _next_step_limit_seconds(self) -> float:
        """Return the limit for the next step; the process's first step has a longer one."""
        return self.step if self._stepped else self.first_step

    def _limit_collectives_and_step(self, seconds: float) -> None:
        """Set the timeout for collectives, and start the same limit for the watchdog and the guard."""
        self.processes.set_timeout(seconds)
        self._limit_watchdog_and_guard(seconds)

    def _limit_watchdog_and_guard(self, seconds: float | None, warn_after_seconds: float | None = None) -> None:
        """Start a limit for the watchdog and, a margin later, for the guard; None removes both."""
        self._allowed = seconds or 0.0
        self._slow_after = self._allowed / 2 if warn_after_seconds is None else warn_after_seconds
        limit = None if seconds is None else seconds + self.watchdog_margin
        if self._watchdog is not None:
            self._watchdog.start_limit(limit, slow_after_seconds=self._slow_after)
        # from the environment, because the mesh may not be open yet
        text = f"rank {os.environ.get('RANK', '0')} hangs: {self._describe_exceeded_limit()}"
        if self._watchdog is not None:
            text += ", and keeps Python's threads from running"
        set_guard_limit(None if limit is None else limit + GUARD_MARGIN, text)

    def _describe_exceeded_limit(self) -> str:
        """Return a sentence about the exceeded limit: step, seconds and phase."""
        phase = f" in phase [{self._phase}]" if self._phase else ""
        return f"{self._where} took more than {self._allowed:g} s{phase}"

    def _warn_slow(self, _limit: float) -> None:
        """Warn before the limit is over. Runs in the watchdog's thread."""
        phase = f" in phase [{self._phase}]" if self._phase else ""
        text = "rank %d is slow: %s has taken more than %g s%s; its limit is %g s"
        log.warning(text, self.mesh.world.rank, self._where, self._slow_after, phase, self._allowed)

    def _report_and_exit(self, _limit: float) -> None:
        """Report the hang, and exit, unless the run goes on without other ranks. Runs in the watchdog's thread."""
        from drawloom.components.listeners.hang_report import report_hang_and_must_exit

        if report_hang_and_must_exit(self._describe_exceeded_limit(), self.folder, self.mesh, self.processes):
            self.exit(1)


def set_guard_limit(seconds: float | None, text: str = "") -> None:
    """Start a limit of the guard process, None for no limit; `text` is the message if the limit is exceeded."""
    from drawloom.components.distributed.guard import guard

    guard.set_time_limit(seconds, text)
