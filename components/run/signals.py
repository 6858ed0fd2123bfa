"""
Signals that ask the run to end: it ends after the step, on all ranks, with its state saved.

A handler in Python runs when the main thread comes to Python code again, and not while it waits for other ranks or for
a kernel. So the interpreter is asked to write each signal's number into a socket, which it does at once, and a thread
reads them there.
"""

import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Set
from contextlib import suppress
from types import FrameType
from typing import Any, Literal

import attrs
import torch

from drawloom.components.ports.distributed import Mesh
from drawloom.graph import above, component, setting

TAKEN = (signal.SIGINT, signal.SIGTERM)
ECHO = 1.0  # seconds; what a cluster sends to every process of a job, torchrun sends on to its workers once more
NOTICE = b"\nstopping after this step; a second signal ends at once\n"
ABANDONED = "the run did not end within %g s after signal %d, so it ends as it stands; what was saved last is there"

log = logging.getLogger("drawloom.run")


class _Listener:
    """Reads the numbers of signals from the socket into which the interpreter writes them, and tells some of them."""

    def __init__(
        self, taken: Set[int], echo: float, hear: Callable[[int, int], float | None], expired: Callable[[int], None]
    ) -> None:
        self._taken = taken
        self._echo = echo
        self._hear = hear
        self._expired = expired
        self._ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self._before = signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read no more."""
        signal.set_wakeup_fd(self._before)
        self._theirs.close()
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._ours.close()

    def _listen(self) -> None:
        count, first, began, end = 0, 0, 0.0, float("inf")
        while True:
            patience = None if end == float("inf") else max(0.0, end - time.monotonic())
            if not select.select([self._ours], [], [], patience)[0]:
                self._expired(first)
                return
            numbers = self._ours.recv(64)
            if not numbers:
                return
            for number in filter(self._taken.__contains__, numbers):
                if count and time.monotonic() - began < self._echo:
                    continue
                count, first, began = count + 1, first or number, began or time.monotonic()
                grace = self._hear(number, count)
                end = end if grace is None else time.monotonic() + grace


@component(impact="safe")
class Signals:
    """
    Takes SIGINT and SIGTERM while the run is open: the first asks for an end, one a second later ends at once.

    A process that has not ended in the time that whoever stops it grants is ended as it stands: what was committed
    last is where the run goes on. In a thread other than the main one no signal can be taken, and none is.
    """

    mesh: Mesh
    grace: float = setting(default=25.0, check=above(0), doc="seconds from the first signal until the process ends")
    extra_signals: list[Literal["SIGUSR1", "SIGUSR2", "SIGHUP"]] = setting(
        factory=list, doc="more signals that ask for an end, such as a cluster's early warning"
    )

    exit: Callable[[int], object] = attrs.field(init=False, default=os._exit)
    debounce: float = attrs.field(init=False, default=ECHO)
    _before: dict[int, Any] = attrs.field(init=False, factory=dict)
    _noted: int = attrs.field(init=False, default=0)
    _listener: _Listener | None = attrs.field(init=False, default=None)

    def open(self) -> None:
        """Take the signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        taken = {*TAKEN, *(signal.Signals[name] for name in self.extra_signals)}
        self._listener = _Listener(taken, self.debounce, self._hear, self._expired)
        for number in taken:
            self._before[number] = signal.signal(number, self._note)

    def close(self) -> None:
        """Let signals do what they did before."""
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def agreed(self) -> int:
        """The largest number of a signal that any rank noted, 0 if none did; all ranks call it."""
        largest = torch.tensor(self._noted, dtype=torch.int64)
        self.mesh.world.max(largest)
        return int(largest)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        """In the main thread, at some time."""
        self._noted = self._noted or number

    def _hear(self, number: int, count: int) -> float | None:
        """In the listener's thread, at once: how long the process may still take, if this is the first."""
        if count > 1:
            self.exit(128 + number)
            return None
        self._noted = self._noted or number
        if self.mesh.world.rank == 0:
            with suppress(OSError):
                os.write(2, NOTICE)  # print and logging may be in the middle of a line
        return self.grace

    def _expired(self, number: int) -> None:
        """In the listener's thread, when that time is up."""
        told = threading.Thread(target=log.error, args=(ABANDONED, self.grace, number), daemon=True)
        told.start()
        told.join(1.0)  # the log may hang on the same disk as the run
        self.exit(128 + number)
