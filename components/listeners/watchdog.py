"""A thread that notices when something takes too long, wherever it hangs."""

import math
import threading
import time
from collections.abc import Callable

Clock = Callable[[], float]


class Watchdog:
    """
    Calls `expired` with a limit, once, when what was allowed so many seconds has not ended after them, and `slow`
    before, when as many of them are over as it was told.

    The thread looks every `tick` seconds. Of the time between two looks no more than two ticks count: a process that
    was suspended, or a machine that slept, is not taken for one that hangs.
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
        self._looked = 0.0
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
        """What begins now may take so long, and is slow after `slow` seconds; None is as long as it likes."""
        with self._lock:
            self._limit, self._left, self._looked = seconds, seconds or 0.0, self._clock()
            self._until_slow = self._left - slow

    def look(self) -> None:
        """See whether time is up."""
        with self._lock:
            now = self._clock()
            self._left -= min(now - self._looked, 2 * self._tick)
            self._looked = now
            limit = self._limit or 0.0
            expired = self._limit is not None and self._left <= 0
            slow = self._limit is not None and self._left <= self._until_slow
            if slow:
                self._until_slow = -math.inf
            if expired:
                self._limit = None
        if expired:
            self._expired(limit)
        elif slow:
            self._slow(limit)

    def _watch(self) -> None:
        while not self._closing.wait(self._tick):
            self.look()
