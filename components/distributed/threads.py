"""Functions run in threads, with results and errors in futures."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

T = TypeVar("T")


def submit_in_new_thread(name: str, work: Callable[[], T]) -> Future[T]:
    """Run work in a new daemon thread."""
    future: Future[T] = Future()
    # not a ThreadPoolExecutor, because Python joins its threads at exit: a hanging one would keep the process alive
    threading.Thread(target=_complete_future, args=(future, [work]), name=name, daemon=True).start()
    return future


def map_parallel(name: str, works: Sequence[Callable[[], T]], max_threads: int) -> list[T]:
    """
    Return all works' results, in order, from up to `max_threads` threads; raise the first error after all have
    ended.
    """
    if len(works) < 2 or max_threads == 1:
        return [work() for work in works]
    shares = [
        submit_in_new_thread(name, partial(map_parallel, name, works[start::max_threads], 1))
        for start in range(min(max_threads, len(works)))
    ]
    wait(shares)
    results = [share.result() for share in shares]
    return [results[index % len(results)][index // len(results)] for index in range(len(works))]


def _complete_future(future: Future[T], works: list[Callable[[], T]]) -> None:
    """Run the single work in the list, and complete the future."""
    try:
        # popped, to release the work and its memory before the future is done
        result = works.pop()()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
