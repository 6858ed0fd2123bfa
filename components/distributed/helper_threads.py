"""Helper threads, which call functions for other threads; these need not wait for the end."""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import attrs


@attrs.define(eq=False)
class HelperCall:
    """A function's call in a helper thread; `settled` is set at its end. Its result or error is kept for the caller."""

    function: Callable[[], Any]
    settled: threading.Event
    _helper: "SimpleQueue[HelperCall | None]"
    _outcome: tuple[Any, BaseException | None] | None = None

    @property
    def is_done(self) -> bool:
        """Return whether the function has returned or raised."""
        return self._outcome is not None

    def run(self) -> None:
        """Call the function, and keep its outcome."""
        try:
            self._outcome = self.function(), None
        except BaseException as error:
            self._outcome = None, error
        self.settled.set()

    def get_result(self) -> Any:
        """Return the function's result, or raise its error."""
        assert self._outcome is not None
        result, error = self._outcome
        if error is not None:
            raise error
        return result


@attrs.define(eq=False)
class HelperThreads:
    """Helper threads, started as needed; an idle one is used again."""

    _idle: list["SimpleQueue[HelperCall | None]"] = attrs.field(init=False, factory=list)

    def start(self, function: Callable[[], Any], settled: threading.Event) -> HelperCall:
        """Start to call a function in a helper thread, which sets `settled` at the end."""
        try:
            helper = self._idle.pop()
        except IndexError:
            helper = SimpleQueue()
            threading.Thread(target=_serve_calls, args=(helper,), name="helper", daemon=True).start()
        call = HelperCall(function, settled, helper)
        helper.put(call)
        return call

    def finish_or_abandon(self, call: HelperCall) -> bool:
        """Return whether a call is done; its thread is idle then, and otherwise ends after the call."""
        if not call.is_done:
            call._helper.put(None)
            return False
        self._idle.append(call._helper)
        return True

    def end(self) -> None:
        """End all idle threads."""
        while self._idle:
            self._idle.pop().put(None)


def _serve_calls(calls: "SimpleQueue[HelperCall | None]") -> None:
    """Run calls from a queue until it yields None."""
    while (call := calls.get()) is not None:
        call.run()
        del call
