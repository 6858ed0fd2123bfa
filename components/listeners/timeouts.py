"""How long a step may take, the first one and those that save longer than others, before the process ends itself."""

import faulthandler
import logging
import os
import threading
from collections.abc import Callable

import attrs

from drawloom.components.listeners.rank_log import rank_log
from drawloom.components.listeners.watchdog import Watchdog
from drawloom.components.ports.distributed import Mesh, Timed
from drawloom.components.ports.run import Event, RunFolder
from drawloom.graph import above, component, setting

log = logging.getLogger("drawloom.run")

WATCHDOG_MARGIN = 2.0  # seconds more than ranks wait for one another: one that waits can say so itself
REPORT_TIMEOUT = 5.0  # seconds for the message and the stacks, which may hang on the same disk as the run


@component(impact="safe")
class Timeouts:
    """
    Limits, by what the run is doing, how long ranks wait for one another and how long a step may take in all.

    A rank that waits for another longer than that fails, and names the other. A process that is beyond its limit by
    some seconds hangs where nothing else would notice: it logs where it is and who keeps it waiting, dumps the stacks
    of its threads to its log, and ends with exit code 1.
    """

    processes: Timed
    folder: RunFolder
    mesh: Mesh
    first_step: float = setting(default=1800.0, check=above(0), doc="seconds for the first step of a process")
    step: float = setting(default=600.0, check=above(0), doc="seconds for each later step")
    saving: float = setting(default=1800.0, check=above(0), doc="seconds to save, and to finish after the last step")

    exit: Callable[[int], object] = attrs.field(init=False, default=os._exit)
    tick: float = attrs.field(init=False, default=0.5)
    watchdog_margin: float = attrs.field(init=False, default=WATCHDOG_MARGIN)
    _watchdog: Watchdog | None = attrs.field(init=False, default=None)
    _stepped: bool = attrs.field(init=False, default=False)
    _where: str = attrs.field(init=False, default="before the first step")
    _phase: str = attrs.field(init=False, default="")
    _allowed: float = attrs.field(init=False, default=0.0)

    def open(self) -> None:
        """Start to watch; there is no limit yet."""
        self._watchdog = Watchdog(self._expired, self.tick, slow=self._slow)
        self._watchdog.start()

    def close(self) -> None:
        """Watch no more."""
        if self._watchdog is not None:
            self._watchdog.stop()
            self._watchdog = None

    def on_event(self, event: Event) -> None:
        """Change the limit with what the run is doing; if that fails, there is none any more."""
        try:
            self._follow(event)
        except Exception:
            self._allow(None)
            raise

    def _follow(self, event: Event) -> None:
        self._note_place(event)
        match event.kind:
            case "run_started":
                self._limit(self.first_step)
            case "step_started":
                self._allow(self._of_a_step())
            case "step_ended" if event.step:
                self._end_step(last=event.step.last)
            case "saving_started":
                self._limit(self.saving)
            case "saving_ended":
                self._limit(self._of_a_step())
            case "run_ended":
                self._allow(None)

    def _note_place(self, event: Event) -> None:
        if event.step is not None:
            self._where = f"step {event.step.index}"
        if event.kind in ("phase_started", "phase_ended"):
            self._phase = event.phase if event.kind == "phase_started" else ""
        self.processes.set_location(f"{self._where}, phase [{self._phase}]" if self._phase else self._where)

    def _end_step(self, last: bool) -> None:
        first, self._stepped = not self._stepped, True
        if last:
            self._where = "what follows the last step"
            self._limit(self.saving)
        elif first:
            self._limit(self.step)

    def _of_a_step(self) -> float:
        return self.step if self._stepped else self.first_step

    def _limit(self, seconds: float) -> None:
        self.processes.set_timeout(seconds)
        self._allow(seconds)

    def _allow(self, seconds: float | None) -> None:
        self._allowed = seconds or 0.0
        if self._watchdog is not None:
            self._watchdog.allow(None if seconds is None else seconds + self.watchdog_margin, slow=self._allowed / 2)

    def _slow(self, _limit: float) -> None:
        """In the watchdog's thread: half of the time is over."""
        phase = f" in phase [{self._phase}]" if self._phase else ""
        half = "rank %d is slow: %s takes more than %g s by now%s, and its limit is %g s"
        log.warning(half, self.mesh.world.rank, self._where, self._allowed / 2, phase, self._allowed)

    def _expired(self, _limit: float) -> None:
        """In the watchdog's thread: say so, if that is still possible, and end."""
        speaking = threading.Thread(target=self._say, args=(self._allowed,), name="last words", daemon=True)
        speaking.start()
        speaking.join(REPORT_TIMEOUT)
        self.exit(1)

    def _say(self, limit: float) -> None:
        phase = f" in phase [{self._phase}]" if self._phase else ""
        path = rank_log(self.folder, self.mesh)
        rank = self.mesh.world.rank
        with path.open("a") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        accused = self.processes.diagnose()
        why = f"; {accused}" if accused else ""
        took = f"{self._where} took more than {limit:g} s{phase}"
        self.processes.fail(f"rank {rank} hangs: {took}{why}; stacks are in {path}")
