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
from typing import Literal, NoReturn

import torch

from drawloom import above, component, internal, setting
from drawloom.ports import Mesh, StoppedError

HANDLED = (signal.SIGINT, signal.SIGTERM)
# seconds during which a repeated Ctrl-C is ignored: a terminal sends it to every process, and a launcher forwards it
DEBOUNCE = 1.0
NOTICE = b"\nstopping after this step; Ctrl-C ends at once\n"
FINAL_GRACE = 5.0  # seconds until the process is killed after training, when nothing has to be saved
ABANDONED = "the run did not end within %g s after signal %d, so it is killed; committed checkpoints are intact"

log = logging.getLogger("drawloom.run")


class _SignalHandlers:
    """
    Installed signal handlers, the signals received so far, and the thread that reads the interpreter's wakeup socket.

    They outlive their graph when it is opened again after a loss, so no signal is lost meanwhile. `exit` is called
    `grace` seconds after the first signal; `reports` is True on the rank that prints a notice.
    """

    def __init__(self, handled: Set[int], grace: float, debounce: float, exit: Callable[[int], object]) -> None:
        self.received = 0
        self.reports = self.is_finishing = self.raises = False
        self.debounce = debounce
        self._handled, self._grace, self._exit = handled, grace, exit
        self._first = 0
        self._reading, self._writing = socket.socketpair()
        self._writing.setblocking(False)  # set_wakeup_fd requires it
        self._wakeup_before = signal.set_wakeup_fd(self._writing.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen_until_closed, name="signals", daemon=True)
        self._thread.start()
        self._before = {number: signal.signal(number, self._record_and_raise_after_training) for number in handled}

    def close(self) -> None:
        """Restore the earlier handlers and wakeup descriptor, and end the thread."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._writing.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._reading.close()

    def raise_stopped(self, number: int) -> NoReturn:
        """Raise StoppedError after training."""
        self.raises = False  # a later signal interrupts no cleanup; it ends the process
        log.info("stopped by signal %d after training; the same command completes the run", number)
        raise StoppedError(number)

    def _record_and_raise_after_training(self, number: int, _frame: FrameType | None) -> None:
        """Record a signal, and raise StoppedError after training. Runs in the main thread, perhaps late."""
        self.received = self.received or number
        if self.raises:
            self.raise_stopped(number)

    def _listen_until_closed(self) -> None:
        """Record signals, and exit when the grace period ends. Runs in the reading thread."""
        count, began, end = 0, 0.0, float("inf")
        while True:
            timeout = None if end == float("inf") else max(0.0, end - time.monotonic())
            if not select.select([self._reading], [], [], timeout)[0]:
                self._log_grace_end_and_exit()
                return
            numbers = self._reading.recv(64)
            if not numbers:
                return
            for number in filter(self._handled.__contains__, numbers):
                if count and time.monotonic() - began < self.debounce:
                    continue
                count, began = count + 1, began or time.monotonic()
                if count == 1:
                    end = time.monotonic() + self._record_first_signal_and_get_grace(number)
                elif signal.SIGINT in (number, self._first):
                    self._exit(128 + number)

    def _record_first_signal_and_get_grace(self, number: int) -> float:
        """Record the first signal, print a notice during training, and return the grace period."""
        self._first = number
        if self.is_finishing:
            return min(self._grace, FINAL_GRACE)
        self.received = self.received or number
        if self.reports:
            with suppress(OSError):
                os.write(2, NOTICE)  # print and logging may hold their locks in a blocked main thread
        return self._grace

    def _log_grace_end_and_exit(self) -> None:
        """Log the end of the grace period, and exit."""
        logging_thread = threading.Thread(target=log.error, args=(ABANDONED, self._grace, self._first), daemon=True)
        logging_thread.start()
        logging_thread.join(1.0)  # the log may hang on the same disk as the run
        self._exit(128 + self._first)


@component(impact="safe")
class Signals:
    """
    SIGINT and SIGTERM handler while the run is open: the first signal stops the run after its step.

    A second signal ends the process at once if it or the first one is Ctrl-C. Other repeated signals count once: a
    cluster sends SIGTERM to all processes in a job, and a script and a launcher may forward it seconds later.

    A process still alive after `grace` seconds exits without saving; the run resumes from its last checkpoint. After
    the last step, in a final task such as a sample or an export, a signal ends the run at once. If the run is opened
    again after the loss of a process, signals and the grace period stay. Outside the main thread, where Python can't
    set signal handlers, signals are not handled.
    """

    mesh: Mesh
    grace: float = setting("seconds from the first signal until the process ends", default=25.0, check=above(0))
    extra_signals: list[Literal["SIGUSR1", "SIGUSR2", "SIGHUP"]] = setting(
        "more signals to stop the run, such as a cluster's early warning", factory=list
    )

    exit: Callable[[int], object] = internal(os._exit)
    debounce: float = internal(DEBOUNCE)
    _handlers: _SignalHandlers | None = internal(None)
    _agreed: int = internal(0)

    def open(self) -> None:
        """Install the handlers, unless they are the failed attempt's."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._handlers is None:
            handled = {*HANDLED, *(signal.Signals[name] for name in self.extra_signals)}
            self._handlers = _SignalHandlers(handled, self.grace, self.debounce, self.exit)
        self._handlers.is_finishing = self._handlers.raises = False
        self._handlers.reports = self.mesh.world.rank == 0

    def close(self) -> None:
        """Restore the earlier handlers."""
        if self._handlers is not None:
            self._handlers.close()
            self._handlers = None

    def hand_over(self) -> _SignalHandlers | None:
        """Return the installed handlers; `close` then keeps them."""
        handlers, self._handlers = self._handlers, None
        if handlers is not None:
            handlers.received = handlers.received or self._agreed
        return handlers

    def take_over(self, values: _SignalHandlers | None) -> None:
        """Accept the failed attempt's handlers, with the signals they have received."""
        self._handlers = values

    def agree_on_signal(self) -> int:
        """Return the largest number of a signal that any rank received, 0 without one. A collective."""
        largest = torch.tensor(self._received, dtype=torch.int64)
        self.mesh.world.max(largest)
        self._agreed = int(largest)  # the rank that received it may be lost while the others save
        return self._agreed

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
        if (handlers := self._handlers) is None:
            yield
            return
        handlers.is_finishing = handlers.raises = True
        try:
            if handlers.received:
                handlers.raise_stopped(handlers.received)
            yield
        finally:
            handlers.raises = False

    @property
    def _received(self) -> int:
        return self._handlers.received if self._handlers else 0
