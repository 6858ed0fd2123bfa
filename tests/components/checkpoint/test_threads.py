"""Work in a thread of its own."""

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from drawloom.components.checkpoint.threads import map_parallel, run_now, submit


def test_it_is_done_in_another_thread() -> None:
    """Which keeps no process alive; the result waits in the future."""
    gate = threading.Event()

    def work() -> tuple[str, bool]:
        gate.wait(10)
        thread = threading.current_thread()
        return thread.name, thread.daemon

    future = submit("writing", work)
    assert not future.done()
    gate.set()
    assert future.result(10) == ("writing", True)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_it_raises_waits_too(error: BaseException) -> None:
    """Nothing is lost, and nothing is printed by the thread."""

    def fail() -> None:
        raise error

    assert submit("writing", fail).exception(10) is error
    assert run_now("writing", fail).exception(0) is error


def test_what_it_needed_is_gone_when_it_is_done() -> None:
    """Memory that it held can be used again as soon as the future has its result."""

    class Large:
        """Something that takes room."""

    for _ in range(50):
        large = Large()
        gone = weakref.ref(large)
        future = submit("writing", partial(bool, large))
        del large
        future.result(10)
        assert gone() is None


def test_at_once_is_in_this_thread() -> None:
    """And done when it returns."""
    future = run_now("writing", threading.current_thread)
    assert future.done() and future.result() is threading.current_thread()


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_results_come_in_order(most: int) -> None:
    """However many threads share the work, and there are never more of them at it than one says."""
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


def test_an_error_is_raised_when_all_are_over() -> None:
    """Nothing is still going on when the error is known."""
    over: list[int] = []

    def work(number: int) -> None:
        if number == 0:
            raise ValueError("the first")
        time.sleep(0.05)
        over.append(number)

    with pytest.raises(ValueError, match="the first"):
        map_parallel("x", [partial(work, number) for number in range(2)], 2)
    assert over == [1]
