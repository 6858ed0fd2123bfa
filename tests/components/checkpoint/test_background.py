"""Work in a thread of its own."""

import threading
import weakref
from functools import partial

import pytest

from drawloom.components.checkpoint.background import at_once, in_background


def test_it_is_done_in_another_thread() -> None:
    """Which keeps no process alive; the result waits in the future."""
    gate = threading.Event()

    def work() -> tuple[str, bool]:
        gate.wait(10)
        thread = threading.current_thread()
        return thread.name, thread.daemon

    future = in_background("writing", work)
    assert not future.done()
    gate.set()
    assert future.result(10) == ("writing", True)


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()])
def test_whatever_it_raises_waits_too(error: BaseException) -> None:
    """Nothing is lost, and nothing is printed by the thread."""

    def fail() -> None:
        raise error

    assert in_background("writing", fail).exception(10) is error
    assert at_once("writing", fail).exception(0) is error


def test_what_it_needed_is_gone_when_it_is_done() -> None:
    """Memory that it held can be used again as soon as the future has its result."""

    class Large:
        """Something that takes room."""

    for _ in range(50):
        large = Large()
        gone = weakref.ref(large)
        future = in_background("writing", partial(bool, large))
        del large
        future.result(10)
        assert gone() is None


def test_at_once_is_in_this_thread() -> None:
    """And done when it returns."""
    future = at_once("writing", threading.current_thread)
    assert future.done() and future.result() is threading.current_thread()
