"""Watchdog: a thread with a time limit."""

import math
import threading
import time
from collections.abc import Callable

Clock = Callable[[], float]


class Watchdog:
    """
    Thread that calls `on_expired(limit)` once when a time limit is over, and `on_slow(limit)` once at an earlier time.

    It polls every `poll_seconds`, and counts at most twice this time between two polls, so a limit does not expire
    while the process is suspended or the machine sleeps.
    """

    def __init__(
        self,
        on_expired: Callable[[float], None],
        poll_seconds: float = 1.0,
        clock: Clock = time.monotonic,
        on_slow: Callable[[float], None] = lambda _limit: None,
    ) -> None:
        self._expired = on_expired
        self._slow = on_slow
        self._tick = poll_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._limit: float | None = None
        self._left = 0.0
        self._polled = 0.0
        self._until_slow = -math.inf
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll_until_stopped, name="watchdog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def start_limit(self, seconds: float | None, slow_after_seconds: float = math.inf) -> None:
        """Start a limit in seconds, or remove it if None; `on_slow` is called after `slow_after_seconds`."""
        with self._lock:
            self._limit, self._left, self._polled = seconds, seconds or 0.0, self._clock()
            self._until_slow = self._left - slow_after_seconds

    def check_limit(self) -> None:
        """Call `on_expired` or `on_slow` if the limit, or the time until slow, is over."""
        with self._lock:
            now = self._clock()
            self._left -= min(now - self._polled, 2 * self._tick)
            self._polled = now
            limit = self._limit or 0.0
            has_expired = self._limit is not None and self._left <= 0
            is_slow = self._limit is not None and self._left <= self._until_slow
            if is_slow:
                self._until_slow = -math.inf
            if has_expired:
                self._limit = None
        # called without the lock, because both callbacks may call allow
        if has_expired:
            self._expired(limit)
        elif is_slow:
            self._slow(limit)

    def _poll_until_stopped(self) -> None:
        """Check the limit every `poll_seconds` until `stop`."""
        while not self._closing.wait(self._tick):
            self.check_limit()
