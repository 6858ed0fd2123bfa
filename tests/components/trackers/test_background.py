"""A background thread with a queue of tasks."""

import threading
import time
from collections.abc import Callable

import pytest

from drawloom.components.trackers.background import Background, OneWarning


def _nothing() -> None: ...


def _append(to: list[int], number: int) -> Callable[[], None]:
    return lambda: to.append(number)


def test_tasks_run_in_order_and_the_last_one_last() -> None:
    """Closing waits for queued tasks, and then for the last one."""
    done: list[int] = []
    background = Background("test", 100, failed=lambda _: None, last=_append(done, -1))
    assert all(background.put(_append(done, number)) for number in range(50))
    assert background.close(10)
    assert done == [*range(50), -1]


def test_a_full_queue_refuses_a_task_at_once() -> None:
    """With one task running and two queued, the fourth is refused without waiting."""
    begun, gate = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        begun.set()
        gate.wait(10)

    background = Background("test", 2, failed=lambda _: None, last=_nothing)
    background.put(first)
    begun.wait(10)
    assert [background.put(_append(done, number)) for number in range(3)] == [True, True, False]
    gate.set()
    assert background.close(10)
    assert done == [0, 1]


def test_a_task_that_raises_does_not_stop_the_others() -> None:
    """Its error is reported, and the next task and the last one run."""
    errors: list[Exception] = []
    done: list[int] = []
    background = Background("test", 10, failed=errors.append, last=_append(done, -1))
    background.put(lambda: done.append(1 // 0))
    background.put(_append(done, 2))
    assert background.close(10)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert done == [2, -1]


def test_closing_has_a_timeout() -> None:
    """With a task that hangs, with a full queue or not, closing returns after its seconds."""
    gate = threading.Event()
    for waiting in (0, 2):
        begun = threading.Event()

        def hang(begun: threading.Event = begun) -> None:
            begun.set()
            gate.wait(10)

        background = Background("test", 2, failed=lambda _: None, last=_nothing)
        background.put(hang)
        begun.wait(10)
        for _ in range(waiting):
            background.put(_nothing)
        start = time.monotonic()
        assert not background.close(0.05)
        assert time.monotonic() - start < 5
    gate.set()


def test_waiting_for_a_task_has_a_timeout() -> None:
    """It runs after those queued before; one that raises is done; one that hangs is waited for up to the timeout."""
    gate = threading.Event()
    done: list[int] = []
    background = Background("test", 10, failed=lambda _: None, last=_nothing)
    background.put(_append(done, 1))
    assert background.run(_append(done, 2), 10)
    assert done == [1, 2]
    assert background.run(lambda: done.append(1 // 0), 10)
    assert not background.run(lambda: done.append(gate.wait(10)), 0.05)
    gate.set()
    assert background.close(10)


def test_one_warning_is_the_first(caplog: pytest.LogCaptureFixture) -> None:
    """What follows it is not logged, and another tracker's first one is."""
    warn, other = OneWarning(), OneWarning()
    for text in ("first", "second"):
        warn(text)
    other("third")
    assert caplog.messages == ["first", "third"]
