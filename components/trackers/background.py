"""Shared by trackers of other programs: a background thread that runs queued tasks in order, and one warning."""

import logging
import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import attrs

from drawloom.components.ports.distributed import Mesh
from drawloom.components.ports.run import Value
from drawloom.components.ports.tracking import Histogram
from drawloom.graph import above, at_least, inherited, setting

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


def finite_numbers(values: Mapping[str, Value]) -> dict[str, float]:
    """Return the values that are finite numbers, as floats."""
    return {name: float(value) for name, value in values.items() if value is not None and math.isfinite(value)}


@inherited
class TrackerInBackground(ABC):
    """
    Queues the finite values of steps for a thread, on rank 0, so that writing can neither delay a step nor end the run.

    Steps that are not written in time are dropped, with one warning, and so is what fails. Subclasses write, in the
    order of the run; of theirs only `_prepare` runs in the thread of the run, and may raise UserError.
    """

    called: ClassVar[str]

    mesh: Mesh
    queue_size: int = setting(default=1000, check=at_least(1), doc="most steps queued for writing")
    timeout: float = setting(default=10.0, check=above(0), doc="seconds to wait at the end for what is queued")

    _background: Background | None = attrs.field(init=False, default=None)
    _warn: OneWarning = attrs.field(init=False, factory=OneWarning)

    def open(self) -> None:
        """Prepare, and start the thread, on rank 0. Raises UserError where what it writes with or into is missing."""
        if self.mesh.world.rank == 0:
            self._prepare()
            self._background = Background(self.called, self.queue_size, self._failed, self._end)

    def close(self) -> None:
        """Write queued values, within `timeout` seconds."""
        background, self._background = self._background, None
        if background is not None and not background.close(self.timeout):
            text = f"{self.called} was not done within {self.timeout:g} s"
            self._warn(f"{text}; some of the last steps are missing there")

    def rewind(self, step: int) -> None:
        """Begin to write the steps after this one."""
        self._put(partial(self._begin, step))

    def track(self, step: int, values: Mapping[str, Value]) -> None:
        """Queue the finite values of a step."""
        self._put(partial(self._write, step, finite_numbers(values)))

    @abstractmethod
    def _prepare(self) -> None:
        """Load what is needed, and refuse a folder that leads elsewhere."""

    @abstractmethod
    def _begin(self, step: int) -> None:
        """Have later steps follow this one; also in a run that writes already, and goes back."""

    @abstractmethod
    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the values of a step."""

    @abstractmethod
    def _end(self) -> None:
        """Finish what is written."""

    def _put(self, task: Task) -> None:
        if self._background is not None and not self._background.put(task):
            self._warn(f"{self.called} does not keep up; some steps will be missing there")

    def _failed(self, error: Exception) -> None:
        self._warn(f"{self.called} failed, some steps will be missing there: {type(error).__name__}: {error}")


@inherited
class ServiceTracker(TrackerInBackground):
    """A tracker in the background of a program that shows runs with their histograms and properties."""

    _properties: Mapping[str, Any] = attrs.field(init=False, factory=dict)

    def describe(self, properties: Mapping[str, Any]) -> None:
        """Keep the properties for the beginning of the run there, which `rewind` queues."""
        self._properties = properties

    def track_distributions(self, step: int, distributions: Mapping[str, Histogram]) -> None:
        """Queue the histograms of a step."""
        self._put(partial(self._write_distributions, step, distributions))

    @abstractmethod
    def _write_distributions(self, step: int, distributions: Mapping[str, Histogram]) -> None:
        """Write the histograms of a step."""
