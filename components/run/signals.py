"""Signals to stop the run after its step, on all ranks, with its state saved."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Literal

import torch

from drawloom import above, component, internal, setting
from drawloom.ports import Mesh

if TYPE_CHECKING:
    from drawloom.components.run.signal_handlers import SignalHandlers
    from drawloom.components.state.host_copy import HostCopy

HANDLED = (signal.SIGINT, signal.SIGTERM)
# seconds during which a repeated Ctrl-C is ignored: a terminal sends it to every process, and a launcher forwards it
DEBOUNCE = 1.0


@component(impact="safe")
class Signals:
    """
    SIGINT and SIGTERM handler while the run is open: the first signal stops the run after its step, or the next one.

    A second signal ends the process at once if it or the first one is Ctrl-C. Other repeated signals count once: a
    cluster sends SIGTERM to all processes in a job, and a script and a launcher may forward it seconds later.

    A process still alive after `grace` seconds exits without saving; the run resumes from its last checkpoint. After
    the last step, in a final task such as a sample or an export, a signal ends the run at once; all ranks end together
    if it came before the first one. If the run is opened again after the loss of a process, signals and the grace
    period stay. Outside the main thread, where Python can't set signal handlers, signals are not handled.
    """

    mesh: Mesh
    grace: float = setting("seconds from the first signal until the process ends", default=25.0, check=above(0))
    extra_signals: list[Literal["SIGUSR1", "SIGUSR2", "SIGHUP"]] = setting(
        "more signals to stop the run, such as a cluster's early warning", factory=list
    )

    exit: Callable[[int], object] = internal(os._exit)
    debounce: float = internal(DEBOUNCE)
    _handlers: "SignalHandlers | None" = internal(None)
    _agreed: int = internal(0)
    _copy: "HostCopy | None" = internal(None)

    def open(self) -> None:
        """Install the handlers, unless they are the failed attempt's."""
        if threading.current_thread() is not threading.main_thread():
            return
        if self._handlers is None:
            from drawloom.components.run.signal_handlers import SignalHandlers

            handled = {*HANDLED, *(signal.Signals[name] for name in self.extra_signals)}
            self._handlers = SignalHandlers(handled, self.grace, self.debounce, self.exit)
        self._handlers.is_finishing = self._handlers.raises = False
        self._handlers.reports = self.mesh.world.rank == 0

    def close(self) -> None:
        """Restore the earlier handlers."""
        if self._handlers is not None:
            self._handlers.close()
            self._handlers = None

    def hand_over(self) -> "SignalHandlers | None":
        """Return the installed handlers; `close` then keeps them."""
        handlers, self._handlers = self._handlers, None
        if handlers is not None:
            handlers.received = handlers.received or self._agreed
        return handlers

    def take_over(self, values: "SignalHandlers | None") -> None:
        """Accept the failed attempt's handlers, with the signals they have received."""
        self._handlers = values

    def agree_on_signal(self) -> int:
        """
        Return the largest number of a signal that any rank received, 0 without one. A collective.

        Several GPUs stop a step later, because the host would wait for this step's kernels to read the number.
        """
        from drawloom.components.state.host_copy import HostCopy

        world, received = self.mesh.world, self._handlers.received if self._handlers else 0
        largest = torch.full((), received, dtype=torch.int64, device=world.device)
        world.max(largest)
        earlier, self._copy = self._copy, HostCopy.start({"signal": largest})
        # the rank that received it may be lost while the others save
        self._agreed = _read_signal(earlier if largest.is_cuda else self._copy)
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
        self.agree_on_signal()
        agreed = _read_signal(self._copy)  # no later step reads what GPUs have agreed on after the last one
        if (handlers := self._handlers) is None:
            yield
            return
        handlers.is_finishing = handlers.raises = True
        try:
            if signal := agreed or handlers.received:
                handlers.raise_stopped(signal)
            yield
        finally:
            handlers.raises = False


def _read_signal(copy: "HostCopy | None") -> int:
    return int(copy.read()["signal"]) if copy else 0
