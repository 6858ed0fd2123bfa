"""Jobs done in one thread and in order, while whoever gives them never waits."""

import queue
import threading
import time
from collections.abc import Callable

Job = Callable[[], None]


class Background:
    """
    A thread with room for so many jobs that wait.

    What a job raises goes to `failed`, and the next job is taken. `last` is done after all others. A thread that hangs
    keeps no process alive.
    """

    def __init__(self, name: str, room: int, failed: Callable[[Exception], None], last: Job) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(room)
        self._failed = failed
        self._last = last
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def give(self, job: Job) -> bool:
        """Have a job done some time; False, and nothing happens, if there is no room."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self, seconds: float) -> bool:
        """Wait until all is done, but no longer than that; False if something is not."""
        until = time.monotonic() + seconds
        try:
            self._jobs.put(None, timeout=seconds)
        except queue.Full:
            return False
        self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

    def _work(self) -> None:
        for job in iter(self._jobs.get, None):
            self._try(job)
        self._try(self._last)

    def _try(self, job: Job) -> None:
        try:
            job()
        except Exception as error:
            self._failed(error)
