"""Functions run in threads."""

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from drawloom.components.distributed.threads import map_parallel, submit_in_new_thread


def test_submit_runs_in_a_daemon_thread() -> None:
    """The thread does not keep the process alive; the result is in the future."""
    gate = threading.Event()

    def work() -> tuple[str, bool]:
        gate.wait(10)
        thread = threading.current_thread()
        return thread.name, thread.daemon

    future = submit_in_new_thread("writing", work)
    assert not future.done()
    gate.set()
    assert future.result(10) == ("writing", True)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_exceptions_are_in_the_future(error: BaseException) -> None:
    """No exception is lost or printed by the thread."""

    def fail() -> None:
        raise error

    assert submit_in_new_thread("writing", fail).exception(10) is error


def test_memory_of_the_work_is_free_when_the_future_is_done() -> None:
    """Memory used by the work can be reused as soon as the future has a result."""

    class Large:
        """An object with large memory."""

    for _ in range(50):
        large = Large()
        gone = weakref.ref(large)
        future = submit_in_new_thread("writing", partial(bool, large))
        del large
        future.result(10)
        assert gone() is None


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_results_come_in_order(most: int) -> None:
    """Results are in the order of the works, and at most `most` threads run at a time."""
    lock, busy, seen = threading.Lock(), [0], list[int]()

    def work(number: int) -> int:
        with lock:
            busy[0] += 1
            seen.append(busy[0])
        time.sleep(0.002)
        with lock:
            busy[0] -= 1
        return number * number

    assert map_parallel("x", [partial(work, number) for number in range(7)], most) == [n * n for n in range(7)]
    assert max(seen) <= most
    assert map_parallel("x", list[Callable[[], int]](), most) == []


def test_an_error_is_raised_after_all_works_end() -> None:
    """No work is still running when the error is raised."""
    over: list[int] = []

    def work(number: int) -> None:
        if number == 0:
            raise ValueError("the first")
        time.sleep(0.05)
        over.append(number)

    with pytest.raises(ValueError, match="the first"):
        map_parallel("x", [partial(work, number) for number in range(2)], 2)
    assert over == [1]
