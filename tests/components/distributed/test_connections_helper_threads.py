"""Calls in helper threads."""

import threading

import pytest

from drawloom.components.distributed.connections import HelperThreads


def test_an_idle_thread_is_used_again_and_errors_reach_the_caller() -> None:
    """Two calls one after the other run in one thread, not the caller's; the second one's error is raised."""
    helpers, threads = HelperThreads(), []

    def fail() -> None:
        threads.append(threading.get_ident())
        raise ZeroDivisionError

    for function in (lambda: threads.append(threading.get_ident()), fail):
        settled = threading.Event()
        call = helpers.start(function, settled)
        assert settled.wait(10) and helpers.finish_or_abandon(call)
    assert len({*threads}) == 1 and threads[0] != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        call.get_result()


def test_an_abandoned_thread_ends_with_its_call() -> None:
    """It is not used for another call meanwhile, and ends as soon as the function returns."""
    helpers, started, may_end, threads = HelperThreads(), threading.Event(), threading.Event(), []

    def wait() -> None:
        threads.append(threading.current_thread())
        started.set()
        may_end.wait()

    abandoned = helpers.start(wait, threading.Event())
    assert started.wait(10)
    assert not helpers.finish_or_abandon(abandoned)
    settled = threading.Event()
    call = helpers.start(lambda: threads.append(threading.current_thread()), settled)
    assert settled.wait(10) and helpers.finish_or_abandon(call)
    may_end.set()
    threads[0].join(10)
    assert not threads[0].is_alive() and threads[1].is_alive()
    helpers.end()
    threads[1].join(10)
    assert not threads[1].is_alive()
