"""
Signals to stop the run after its step, on all ranks, with its state saved.

A Python signal handler runs only when the main thread returns to Python code, not while it is blocked in a collective
or a kernel. So the interpreter writes a signal's number to a socket at once (signal.set_wakeup_fd), and a thread reads
the socket.
"""

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any, Literal, NoReturn

import attrs
import torch

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import StoppedError
from drawloom.graph import above, component, setting

HANDLED = (signal.SIGINT, signal.SIGTERM)
# seconds during which a repeated Ctrl-C is ignored: a terminal sends it to every process, and a launcher forwards it
DEBOUNCE = 1.0
NOTICE = b"\nstopping after this step; Ctrl-C ends at once\n"
FINAL_GRACE = 5.0  # seconds until the process is killed after training, when nothing has to be saved
ABANDONED = "the run did not end within %g s after signal %d, so it is killed; committed checkpoints are intact"

log = logging.getLogger("drawloom.run")


class _SignalReader:
    """
    Thread that reads signal numbers from the interpreter's wakeup socket.

    It calls `on_signal` with the number and the signal count so far, and `on_expired` with the first signal's number
    after as many seconds as `on_signal` returned.
    """

    def __init__(
        self,
        handled: Set[int],
        debounce: float,
        on_signal: Callable[[int, int], float | None],
        on_expired: Callable[[int], None],
    ) -> None:
        self._handled = handled
        self._debounce = debounce
        self._record_signal_and_get_grace = on_signal
        self._log_grace_end_and_exit = on_expired
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)  # set_wakeup_fd requires it
        self._before = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen_until_closed, name="signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Restore the earlier wakeup descriptor, and end the thread."""
        signal.set_wakeup_fd(self._before)
        self._writing.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._reading.close()

    def _listen_until_closed(self) -> None:
        count, first, began, end = 0, 0, 0.0, float("inf")
        while True:
            timeout = None if end == float("inf") else max(0.0, end - time.monotonic())
            if not select.select([self._reading], [], [], timeout)[0]:
                self._log_grace_end_and_exit(first)
                return
            numbers = self._reading.recv(64)
            if not numbers:
                return
            for number in filter(self._handled.__contains__, numbers):
                if count and time.monotonic() - began < self._debounce:
                    continue
                count, first, began = count + 1, first or number, began or time.monotonic()
                grace = self._record_signal_and_get_grace(number, count)
                end = end if grace is None else time.monotonic() + grace


@component(impact="safe")
class Signals:
    """
    SIGINT and SIGTERM handler while the run is open: the first signal stops the run after its step.

    A second signal ends the process at once if it or the first one is Ctrl-C. Other repeated signals count once: a
    cluster sends SIGTERM to all processes in a job, and a script and a launcher may forward it seconds later.

    A process still alive after `grace` seconds exits without saving; the run resumes from its last checkpoint. After
    the last step, in a final task such as a sample or an export, a signal ends the run at once. Outside the main
    thread, where Python can't set signal handlers, signals are not handled.
    """

    mesh: Mesh
    grace: float = setting(default=25.0, check=above(0), doc="seconds from the first signal until the process ends")
    extra_signals: list[Literal["SIGUSR1", "SIGUSR2", "SIGHUP"]] = setting(
        factory=list, doc="more signals to stop the run, such as a cluster's early warning"
    )

    exit: Callable[[int], object] = attrs.field(init=False, default=os._exit)
    debounce: float = attrs.field(init=False, default=DEBOUNCE)
    _before: dict[int, Any] = attrs.field(init=False, factory=dict)
    _received: int = attrs.field(init=False, default=0)
    _first: int = attrs.field(init=False, default=0)
    _finishing: bool = attrs.field(init=False, default=False)
    _raises: bool = attrs.field(init=False, default=False)
    _reader: _SignalReader | None = attrs.field(init=False, default=None)

    def open(self) -> None:
        """Install the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return
        handled = {*HANDLED, *(signal.Signals[name] for name in self.extra_signals)}
        self._reader = _SignalReader(
            handled, self.debounce, self._record_signal_and_get_grace, self._log_grace_end_and_exit
        )
        for number in handled:
            self._before[number] = signal.signal(number, self._record_and_raise_after_training)

    def close(self) -> None:
        """Restore the earlier handlers."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def agree_on_signal(self) -> int:
        """Return the largest number of a signal that any rank received, 0 without one. A collective."""
        largest = torch.tensor(self._received, dtype=torch.int64)
        self.mesh.world.max(largest)
        return int(largest)

    def agree_on_reason(self, reason: str) -> str:
        """Return the first rank's reason that is not empty. A collective; reasons are sent only if there is one."""
        asked = torch.tensor(bool(reason), dtype=torch.int64)
        self.mesh.world.max(asked)
        return next(filter(None, self.mesh.world.gather_json(reason))) if asked else ""

    def raise_stopped_error_on_signal(self) -> AbstractContextManager[None]:
        """Return a context in whose body a signal raises StoppedError in the main thread."""
        return self._raise_stopped_on_signals()

    @contextmanager
    def _raise_stopped_on_signals(self) -> Iterator[None]:
        self._finishing = self._raises = True
        try:
            if self._received:
                self._raise_stopped(self._received)
            yield
        finally:
            self._raises = False

    def _record_and_raise_after_training(self, number: int, _frame: FrameType | None) -> None:
        """Record a signal, and raise StoppedError after training. Runs in the main thread, perhaps late."""
        self._received = self._received or number
        if self._raises:
            self._raise_stopped(number)

    def _raise_stopped(self, number: int) -> NoReturn:
        self._raises = False  # a later signal interrupts no cleanup; it ends the process
        log.info("stopped by signal %d after training; the same command completes the run", number)
        raise StoppedError(number)

    def _record_signal_and_get_grace(self, number: int, count: int) -> float | None:
        """
        Return the grace period for the first signal, None for later ones. Runs in the signal reader's thread.

        A later signal exits at once if it or the first signal is SIGINT.
        """
        if count > 1:
            if signal.SIGINT in (number, self._first):
                self.exit(128 + number)
            return None
        self._first = number
        if self._finishing:
            return min(self.grace, FINAL_GRACE)
        self._received = self._received or number
        if self.mesh.world.rank == 0:
            with suppress(OSError):
                os.write(2, NOTICE)  # print and logging may hold their locks in a blocked main thread
        return self.grace

    def _log_grace_end_and_exit(self, number: int) -> None:
        """Log the end of the grace period, and exit. Runs in the signal reader's thread."""
        logging_thread = threading.Thread(target=log.error, args=(ABANDONED, self.grace, number), daemon=True)
        logging_thread.start()
        logging_thread.join(1.0)  # the log may hang on the same disk as the run
        self.exit(128 + number)
