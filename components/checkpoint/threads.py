"""Work in a thread of its own, whose outcome waits until somebody asks."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def submit(name: str, work: Callable[[], T]) -> Future[T]:
    """Begin; what the work gives or raises is in the future. A thread that hangs keeps no process alive."""
    future: Future[T] = Future()
    threading.Thread(target=_work, args=(future, [work]), name=name, daemon=True).start()
    return future


def map_parallel(name: str, works: Sequence[Callable[[], T]], most: int) -> list[T]:
    """What these give, in order, done by at most so many threads; the first error, when all are over."""
    if len(works) < 2:
        return [work() for work in works]
    shares = [submit(name, partial(_all, works[start::most])) for start in range(min(most, len(works)))]
    wait(shares)
    done = [share.result() for share in shares]
    return [done[number % len(done)][number // len(done)] for number in range(len(works))]


def run_now(name: str, work: Callable[[], T]) -> Future[T]:
    """The same without a thread: it is done when this returns."""
    future: Future[T] = Future()
    _work(future, [work])
    return future


def _all(works: Sequence[Callable[[], T]]) -> list[T]:
    return [work() for work in works]


def _work(future: Future[T], works: list[Callable[[], T]]) -> None:
    """Do what is in the list and forget it, with all that it holds, before anybody is told that it is done."""
    try:
        result = works.pop()()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
