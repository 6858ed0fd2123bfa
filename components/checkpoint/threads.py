"""Functions run in threads, with results and errors in futures."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def submit(name: str, work: Callable[[], T]) -> Future[T]:
    """Run work in a new daemon thread."""
    future: Future[T] = Future()
    # not a ThreadPoolExecutor: Python joins its threads at exit, so that one that hangs would keep the process alive
    threading.Thread(target=_work, args=(future, [work]), name=name, daemon=True).start()
    return future


def map_parallel(name: str, works: Sequence[Callable[[], T]], most: int) -> list[T]:
    """The results of all works, in order, from at most `most` threads; the first error, when all have ended."""
    if len(works) < 2:
        return [work() for work in works]
    shares = [submit(name, partial(_all, works[start::most])) for start in range(min(most, len(works)))]
    wait(shares)
    done = [share.result() for share in shares]
    return [done[number % len(done)][number // len(done)] for number in range(len(works))]


def run_now(name: str, work: Callable[[], T]) -> Future[T]:
    """Run work in this thread; a completed future."""
    future: Future[T] = Future()
    _work(future, [work])
    return future


def _all(works: Sequence[Callable[[], T]]) -> list[T]:
    return [work() for work in works]


def _work(future: Future[T], works: list[Callable[[], T]]) -> None:
    """Run the one work in the list, and complete the future."""
    try:
        # popped, so that the work and the memory that it holds are released before the future is done
        result = works.pop()()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
