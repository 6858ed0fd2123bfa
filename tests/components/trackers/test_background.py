"""Jobs in a thread."""

import threading
import time
from collections.abc import Callable

from drawloom.components.trackers.background import Background


def _nothing() -> None: ...


def _append(to: list[int], number: int) -> Callable[[], None]:
    return lambda: to.append(number)


def test_all_jobs_are_done_in_order_and_the_last_one_last() -> None:
    """Closing waits for what was given, and then for the last job."""
    done: list[int] = []
    background = Background("test", 100, failed=lambda _: None, last=_append(done, -1))
    assert all(background.give(_append(done, number)) for number in range(50))
    assert background.close(10)
    assert done == [*range(50), -1]


def test_without_room_a_job_is_refused_and_nobody_waits() -> None:
    """One job is at work and two wait: the fourth is refused at once."""
    begun, gate = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        begun.set()
        gate.wait(10)

    background = Background("test", 2, failed=lambda _: None, last=_nothing)
    background.give(first)
    begun.wait(10)
    assert [background.give(_append(done, number)) for number in range(3)] == [True, True, False]
    gate.set()
    assert background.close(10)
    assert done == [0, 1]


def test_a_job_that_raises_does_not_stop_the_others() -> None:
    """Its error is told, and the next job and the last one are done."""
    errors: list[Exception] = []
    done: list[int] = []
    background = Background("test", 10, failed=errors.append, last=_append(done, -1))
    background.give(lambda: done.append(1 // 0))
    background.give(_append(done, 2))
    assert background.close(10)
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert done == [2, -1]


def test_closing_has_a_limit() -> None:
    """With a job that hangs, both with room for the end and without, closing gives up after its seconds."""
    gate = threading.Event()
    for waiting in (0, 2):
        begun = threading.Event()

        def hang(begun: threading.Event = begun) -> None:
            begun.set()
            gate.wait(10)

        background = Background("test", 2, failed=lambda _: None, last=_nothing)
        background.give(hang)
        begun.wait(10)
        for _ in range(waiting):
            background.give(_nothing)
        start = time.monotonic()
        assert not background.close(0.05)
        assert time.monotonic() - start < 5
    gate.set()


def test_a_task_that_is_waited_for_is_done_or_the_wait_is_over() -> None:
    """It comes after those that wait; one that raises is done; one that hangs is waited for only so long."""
    gate = threading.Event()
    done: list[int] = []
    background = Background("test", 10, failed=lambda _: None, last=_nothing)
    background.give(_append(done, 1))
    assert background.do(_append(done, 2), 10)
    assert done == [1, 2]
    assert background.do(lambda: done.append(1 // 0), 10)
    assert not background.do(lambda: done.append(gate.wait(10)), 0.05)
    gate.set()
    assert background.close(10)
