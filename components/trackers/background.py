"""What trackers of other programs share: a background thread that runs queued tasks in order, and one warning."""

import logging
import queue
import threading
import time
from collections.abc import Callable

import attrs

log = logging.getLogger("drawloom.trackers")

Task = Callable[[], None]


@attrs.define
class OneWarning:
    """Logs the first warning that it is given: the others of a program in trouble say the same."""

    _given: bool = False

    def __call__(self, text: str) -> None:
        if not self._given:
            self._given = True
            log.warning("%s", text)


class Background:
    """
    A daemon thread with a queue of at most `queue_size` tasks.

    A task's exception is passed to `failed`, and the next task runs. `last` runs after all others.
    """

    def __init__(self, name: str, queue_size: int, failed: Callable[[Exception], None], last: Task) -> None:
        self._tasks: queue.Queue[Task | None] = queue.Queue(queue_size)
        self._failed = failed
        self._last = last
        # daemon: a task that hangs does not keep the process alive
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, task: Task) -> bool:
        """Queue a task; False if the queue is full."""
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            return False
        return True

    def run(self, task: Task, seconds: float) -> bool:
        """Queue a task and wait for it up to this many seconds; False if it is not done by then."""
        done = threading.Event()

        def run_and_notify() -> None:
            try:
                task()
            finally:
                done.set()

        return self.put(run_and_notify) and done.wait(seconds)

    def close(self, seconds: float) -> bool:
        """Wait up to this many seconds until all tasks are done; False if some are not."""
        end = time.monotonic() + seconds
        try:
            self._tasks.put(None, timeout=seconds)
        except queue.Full:
            return False
        self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    def _work(self) -> None:
        for task in iter(self._tasks.get, None):
            self._try(task)
        self._try(self._last)

    def _try(self, task: Task) -> None:
        try:
            task()
        except Exception as error:
            self._failed(error)
