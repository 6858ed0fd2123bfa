"""A watchdog thread: detects that something takes too long, wherever it hangs."""

import math
import threading
import time
from collections.abc import Callable

Clock = Callable[[], float]


class Watchdog:
    """
    Calls `expired(limit)` once when the limit is over, and `slow(limit)` once at an earlier time.

    The thread polls every `tick` seconds. Between two polls at most two ticks are counted, so that a process that was
    suspended, or a machine that slept, does not expire.
    """

    def __init__(
        self,
        expired: Callable[[float], None],
        tick: float = 1.0,
        clock: Clock = time.monotonic,
        slow: Callable[[float], None] = lambda _limit: None,
    ) -> None:
        self._expired = expired
        self._slow = slow
        self._tick = tick
        self._clock = clock
        self._lock = threading.Lock()
        self._limit: float | None = None
        self._left = 0.0
        self._polled = 0.0
        self._until_slow = -math.inf
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def allow(self, seconds: float | None, slow: float = math.inf) -> None:
        """Start a limit of this many seconds, None for no limit; `slow` is called after `slow` seconds."""
        with self._lock:
            self._limit, self._left, self._polled = seconds, seconds or 0.0, self._clock()
            self._until_slow = self._left - slow

    def poll(self) -> None:
        """Check the limit, and call `expired` or `slow`."""
        with self._lock:
            now = self._clock()
            self._left -= min(now - self._polled, 2 * self._tick)
            self._polled = now
            limit = self._limit or 0.0
            expired = self._limit is not None and self._left <= 0
            slow = self._limit is not None and self._left <= self._until_slow
            if slow:
                self._until_slow = -math.inf
            if expired:
                self._limit = None
        # called without the lock: both may call allow
        if expired:
            self._expired(limit)
        elif slow:
            self._slow(limit)

    def _watch(self) -> None:
        while not self._closing.wait(self._tick):
            self.poll()
