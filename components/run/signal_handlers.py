"""
Installed signal handlers, and their reading thread.

A Python signal handler runs only when the main thread returns to Python code, not while it is blocked in a collective
or a kernel. So the interpreter writes a signal's number to a socket at once (signal.set_wakeup_fd), and a thread reads
the socket.
"""

import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Set
from contextlib import suppress
from types import FrameType
from typing import NoReturn

from drawloom.ports import StoppedError, run_log

NOTICE = b"\nstopping after this step; Ctrl-C ends at once\n"
FINAL_GRACE = 5.0  # seconds until the process is killed after training, when nothing has to be saved
ABANDONED = "the run did not end within %g s after signal %d, so it is killed; committed checkpoints are intact"


class SignalHandlers:
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
        run_log.info("stopped by signal %d after training; the same command completes the run", number)
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
        logging_thread = threading.Thread(target=run_log.error, args=(ABANDONED, self._grace, self._first), daemon=True)
        logging_thread.start()
        logging_thread.join(1.0)  # the log may hang on the same disk as the run
        self._exit(128 + self._first)
