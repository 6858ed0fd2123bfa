"""Tasks done in one thread and in order, while whoever gives them need not wait."""

import queue
import threading
import time
from collections.abc import Callable

Task = Callable[[], None]


class Background:
    """
    A thread with room for so many tasks that wait.

    What a task raises goes to `failed`, and the next one is taken. `last` is done after all others. A thread that
    hangs keeps no process alive.
    """

    def __init__(self, name: str, room: int, failed: Callable[[Exception], None], last: Task) -> None:
        self._tasks: queue.Queue[Task | None] = queue.Queue(room)
        self._failed = failed
        self._last = last
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def give(self, task: Task) -> bool:
        """Have a task done some time; False, and nothing happens, if there is no room."""
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            return False
        return True

    def do(self, task: Task, seconds: float) -> bool:
        """Have a task done, and wait for it, but no longer than that; False if it is not done by then."""
        done = threading.Event()

        def tell() -> None:
            try:
                task()
            finally:
                done.set()

        return self.give(tell) and done.wait(seconds)

    def close(self, seconds: float) -> bool:
        """Wait until all is done, but no longer than that; False if something is not."""
        until = time.monotonic() + seconds
        try:
            self._tasks.put(None, timeout=seconds)
        except queue.Full:
            return False
        self._thread.join(max(0.0, until - time.monotonic()))
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
