"""A background thread with a queue of tasks."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import attrs
import pytest

from drawloom.components.trackers.background import Background, TrackerInBackground
from support.doubles import SecondRank


def _nothing() -> None: ...


def _append(to: list[int], number: int) -> Callable[[], None]:
    return lambda: to.append(number)


def test_tasks_run_in_order_and_the_last_one_last() -> None:
    """Closing waits for queued tasks, and then for the last one."""
    done: list[int] = []
    background = Background("test", 100, on_error=lambda _: None, final_task=_append(done, -1))
    assert all(background.try_to_queue(_append(done, number)) for number in range(50))
    assert background.finish_tasks(10)
    assert done == [*range(50), -1]


def test_a_full_queue_refuses_a_task_at_once() -> None:
    """With one task running and two queued, the fourth is refused without waiting."""
    begun, gate = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        begun.set()
        gate.wait(10)

    background = Background("test", 2, on_error=lambda _: None, final_task=_nothing)
    background.try_to_queue(first)
    begun.wait(10)
    assert [background.try_to_queue(_append(done, number)) for number in range(3)] == [True, True, False]
    gate.set()
    assert background.finish_tasks(10)
    assert done == [0, 1]


def test_a_task_that_raises_does_not_stop_the_others() -> None:
    """Its error is reported, and the next task and the last one run."""
    errors: list[Exception] = []
    done: list[int] = []
    background = Background("test", 10, on_error=errors.append, final_task=_append(done, -1))
    background.try_to_queue(lambda: done.append(1 // 0))
    background.try_to_queue(_append(done, 2))
    assert background.finish_tasks(10)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert done == [2, -1]


def test_closing_has_a_timeout() -> None:
    """With a hanging task, and a full queue or not, closing returns after its seconds."""
    gate = threading.Event()
    for waiting in (0, 2):
        begun = threading.Event()

        def hang(begun: threading.Event = begun) -> None:
            begun.set()
            gate.wait(10)

        background = Background("test", 2, on_error=lambda _: None, final_task=_nothing)
        background.try_to_queue(hang)
        begun.wait(10)
        for _ in range(waiting):
            background.try_to_queue(_nothing)
        start = time.monotonic()
        assert not background.finish_tasks(0.05)
        assert time.monotonic() - start < 5
    gate.set()


def test_waiting_for_a_task_has_a_timeout() -> None:
    """A task runs after earlier ones; a raising one is done; a hanging one is awaited up to the timeout."""
    gate = threading.Event()
    done: list[int] = []
    background = Background("test", 10, on_error=lambda _: None, final_task=_nothing)
    background.try_to_queue(_append(done, 1))
    assert background.run_and_wait(_append(done, 2), 10)
    assert done == [1, 2]
    assert background.run_and_wait(lambda: done.append(1 // 0), 10)
    assert not background.run_and_wait(lambda: done.append(gate.wait(10)), 0.05)
    gate.set()
    assert background.finish_tasks(10)


@attrs.define(eq=False, kw_only=True)
class Notes(TrackerInBackground):
    """A recorder of values; `act` may hang or raise first."""

    called: ClassVar[str] = "Notes"
    act: Any = None
    noted: list[Any] = attrs.field(factory=list)

    def _load_package_and_create_files(self) -> None:
        self.noted.append("prepared")

    def _open_writer_after(self, step: int) -> None:
        self.noted.append(f"after {step}")

    def _write_values(self, step: int, numbers: Mapping[str, float]) -> None:
        if self.act:
            self.act()
        self.noted.append((step, dict(numbers)))

    def _close_writer(self) -> None:
        self.noted.append("end")


NOTES: Any = Notes  # whose fields are inherited by a decorator of its own


def test_finite_values_are_written_in_order(one_rank: Any) -> None:
    """Values become floats; None and values that are not finite are left out; the end comes last."""
    tracker = NOTES(mesh=one_rank)
    tracker.open()
    tracker.rewind(3)
    tracker.track(4, {"loss": 1, "flag": True, "norm": math.inf, "none": None})
    tracker.close()
    assert tracker.noted == ["prepared", "after 3", (4, {"loss": 1.0, "flag": 1.0}), "end"]
    assert all(type(number) is float for number in tracker.noted[2][1].values())


def test_other_ranks_write_nothing(one_rank: Any) -> None:
    """Only rank 0 prepares and writes."""
    tracker = NOTES(mesh=attrs.evolve(one_rank, world=SecondRank()))
    tracker.open()
    tracker.track(1, {"loss": 1.0})
    tracker.close()
    assert tracker.noted == []


def test_a_hanging_or_failing_tracker_neither_delays_nor_ends_a_run(
    one_rank: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A hanging tracker costs the end's waiting time, a raising one nothing; both log one warning."""
    forever = threading.Event()
    hanging = NOTES(mesh=one_rank, act=forever.wait, queue_size=2, timeout=0.1)
    failing = NOTES(mesh=one_rank, act=lambda: 1 // 0)
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING, "drawloom.trackers"):
        for tracker in (hanging, failing):
            tracker.open()
            for step in range(1, 10):
                tracker.track(step, {"loss": 1.0})
            tracker.close()
    forever.set()
    assert time.monotonic() - begin < 5
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and "does not keep up" in messages[0] and "ZeroDivisionError" in messages[1]
