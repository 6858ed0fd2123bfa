"""Time limits for a run's parts, and messages with the present step and phase."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from drawloom.components.distributed.guard import guard
from drawloom.components.listeners.watchdog import Watchdog
from drawloom.ports import Event, Mesh, Processes, RunFolder, run_log

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
        if record.module != "time_limits":  # its warning of a slow component shows no progress of the component
            self._call()


@attrs.define(kw_only=True, eq=False)
class TimeLimits:
    """Limits in seconds for a run's parts; collectives, the watchdog and the guard enforce them."""

    processes: Processes
    folder: RunFolder
    mesh: Mesh
    first_step: float
    step: float
    saving: float
    opening: float
    exit: Callable[[int], object] = os._exit
    tick: float = 0.5
    watchdog_margin: float = WATCHDOG_MARGIN
    _watchdog: Watchdog | None = attrs.field(init=False, default=None)
    _stepped: bool = attrs.field(init=False, default=False)
    _where: str = attrs.field(init=False, default=BEFORE)
    _phase: str = attrs.field(init=False, default="")
    _allowed: float = attrs.field(init=False, default=0.0)
    _slow_after: float = attrs.field(init=False, default=0.0)

    def start_watchdog(self) -> None:
        """Start the watchdog, without a limit yet."""
        self._watchdog = Watchdog(self._report_and_exit, self.tick, on_slow=self._warn_slow)
        self._watchdog.start()

    def stop_watchdog(self) -> None:
        """Stop the watchdog, and lift the guard's time limit."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None
        guard.set_time_limit(None)

    @contextmanager
    def limit_stage(self, stage: str, node: str) -> Iterator[None]:
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

    def limit_next_part(self, event: Event) -> None:
        """Set the time limit for the run's next part, which begins with this event."""
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
        guard.set_time_limit(None if limit is None else limit + GUARD_MARGIN, text)

    def _describe_exceeded_limit(self) -> str:
        """Return a sentence about the exceeded limit: step, seconds and phase."""
        phase = f" in phase [{self._phase}]" if self._phase else ""
        return f"{self._where} took more than {self._allowed:g} s{phase}"

    def _warn_slow(self, _limit: float) -> None:
        """Warn before the limit is over. Runs in the watchdog's thread."""
        phase = f" in phase [{self._phase}]" if self._phase else ""
        text = "rank %d is slow: %s has taken more than %g s%s; its limit is %g s"
        run_log.warning(text, self.mesh.world.rank, self._where, self._slow_after, phase, self._allowed)

    def _report_and_exit(self, _limit: float) -> None:
        """Report the hang, and exit, unless the run goes on without other ranks. Runs in the watchdog's thread."""
        from drawloom.components.listeners.hang_report import report_hang_and_must_exit

        if report_hang_and_must_exit(self._describe_exceeded_limit(), self.folder, self.mesh, self.processes):
            self.exit(1)
