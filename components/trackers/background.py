"""Background thread for trackers of other programs, which runs queued tasks in order, and their warnings."""

import logging
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

from drawloom import UserError, above, at_least, internal, setting
from drawloom.graph import component_base_class
from drawloom.ports import Histogram, Mesh, MetricValues

log = logging.getLogger("drawloom.trackers")

Task = Callable[[], None]


class Background:
    """
    Daemon thread with a queue for at most `queue_size` tasks.

    A task's exception is passed to `on_error`, and the next task runs. The task `final_task` runs after all others.
    """

    def __init__(self, name: str, queue_size: int, on_error: Callable[[Exception], None], final_task: Task) -> None:
        self._tasks: queue.Queue[Task | None] = queue.Queue(queue_size)
        self._on_error = on_error
        self._last = final_task
        # a daemon, so that a task that hangs does not keep the process alive
        self._thread = threading.Thread(target=self._run_tasks, name=name, daemon=True)
        self._thread.start()

    def try_to_queue(self, task: Task) -> bool:
        """Queue a task; return False if the queue is full."""
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            return False
        return True

    def run_and_wait(self, task: Task, seconds: float) -> bool:
        """Queue a task and wait up to `seconds` for it; return False if it is not done by then."""
        done = threading.Event()

        def run_and_notify() -> None:
            try:
                task()
            finally:
                done.set()

        return self.try_to_queue(run_and_notify) and done.wait(seconds)

    def finish_tasks(self, seconds: float) -> bool:
        """Wait up to `seconds` until all tasks are done; return False if some are not done by then."""
        end = time.monotonic() + seconds
        try:
            self._tasks.put(None, timeout=seconds)
        except queue.Full:
            return False
        self._thread.join(max(0.0, end - time.monotonic()))
        return not self._thread.is_alive()

    def _run_tasks(self) -> None:
        """Run queued tasks until `finish_tasks`, and finally `final_task`. Runs in the thread."""
        for task in iter(self._tasks.get, None):
            self._run_task(task)
        self._run_task(self._last)

    def _run_task(self, task: Task) -> None:
        """Run a task, and pass its exception to `on_error`."""
        try:
            task()
        except Exception as error:
            self._on_error(error)


def import_tracker_package(tracker: str, package: str, *modules: str, remark: str = "") -> Any:
    """Import a package and modules of it. Raises UserError with the command to install it if it is missing."""
    try:
        for name in modules:
            import_module(name)
        return import_module(package)
    except ImportError as error:
        raise UserError(
            f"trackers.{tracker}: the package `{tracker}` is missing ({error}); "
            f"pip install 'drawloom[{tracker}]'{remark}, or remove this tracker"
        ) from error


def select_finite_values(values: MetricValues) -> dict[str, float]:
    """Return the finite values as floats, by name."""
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


@component_base_class
class TrackerInBackground(ABC):
    """
    Tracker with a thread that writes finite values on rank 0, so writing can't delay a step or end the run.

    Failed and late steps are dropped, with one warning. Subclass methods run in the thread, in the run's order, except
    `_load_package_and_create_files`, which may raise UserError.
    """

    called: ClassVar[str]

    mesh: Mesh
    queue_size: int = setting("maximum number of steps queued for writing", default=1000, check=at_least(1))
    timeout: float = setting("seconds to wait at the end for queued steps", default=10.0, check=above(0))

    _background: Background | None = internal(None)
    _has_warned: bool = internal(False)

    def open(self) -> None:
        """Prepare, and start the thread on rank 0. Raises UserError if a package or folder is missing."""
        if self.mesh.world.rank == 0:
            self._load_package_and_create_files()
            self._background = Background(self.called, self.queue_size, self._warn_of_error, self._close_writer)

    def close(self) -> None:
        """Write queued values within `timeout` seconds."""
        background, self._background = self._background, None
        if background is not None and not background.finish_tasks(self.timeout):
            self._warn_of_timeout()

    def rewind(self, step: int) -> None:
        """Queue the start of writing after this step."""
        self._queue_task(partial(self._open_writer_after, step))

    def track(self, step: int, values: MetricValues) -> None:
        """Queue a step's finite values."""
        self._queue_task(partial(self._write_values, step, select_finite_values(values)))

    @abstractmethod
    def _load_package_and_create_files(self) -> None:
        """Load the package and check the folder, which must not be a link. Raises UserError."""

    @abstractmethod
    def _open_writer_after(self, step: int) -> None:
        """Prepare to write after this step; later values already in the tracker are dropped if possible."""

    @abstractmethod
    def _write_values(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write a step's values."""

    @abstractmethod
    def _close_writer(self) -> None:
        """Finish writing, as the thread's last task."""

    def _queue_task(self, task: Task) -> None:
        """Queue a task on rank 0; warn if the queue is full."""
        if self._background is not None and not self._background.try_to_queue(task):
            self._warn(f"{self.called} does not keep up; some steps will be missing there")

    def _warn_of_error(self, error: Exception) -> None:
        """Warn about the program's exception."""
        self._warn(f"{self.called} failed, {self._describe_loss()}: {type(error).__name__}: {error}")

    def _warn_of_timeout(self) -> None:
        """Warn about steps that the program has not written at the end."""
        self._warn(f"{self.called} was not done within {self.timeout:g} s; some of the last steps are missing there")

    def _describe_loss(self) -> str:
        """Return which values the program lacks after an exception."""
        return "some steps will be missing there"

    def _warn(self, text: str) -> None:
        """Log only the first warning, because a failing program's later warnings repeat it."""
        if not self._has_warned:
            self._has_warned = True
            log.warning("%s", text)


@component_base_class
class ServiceTracker(TrackerInBackground):
    """Background tracker for a program with histograms and run properties."""

    _properties: Mapping[str, Any] = internal(factory=dict)

    def store_properties(self, properties: Mapping[str, Any]) -> None:
        """Store the properties for the run's beginning, which `rewind` queues."""
        self._properties = properties

    def track_distributions(self, step: int, distributions: Mapping[str, Histogram]) -> None:
        """Queue a step's histograms."""
        self._queue_task(partial(self._write_distributions, step, distributions))

    @abstractmethod
    def _write_distributions(self, step: int, distributions: Mapping[str, Histogram]) -> None:
        """Write a step's histograms."""


@component_base_class
class LoggedRunTracker(ServiceTracker):
    """Service tracker whose package has runs with `log` and `finish`, and histograms like numpy's."""

    _package: Any = internal(None)
    _run: Any = internal(None)

    @abstractmethod
    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log a step's values to the open run."""

    def _write_values(self, step: int, numbers: Mapping[str, float]) -> None:
        self._open_writer_after(step - 1)
        self._log(step, numbers)

    def _write_distributions(self, step: int, distributions: Mapping[str, Histogram]) -> None:
        make = self._package.Histogram
        self._write_values(
            step, {name: make(np_histogram=(item.counts, item.edges)) for name, item in distributions.items()}
        )

    def _close_writer(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish()
