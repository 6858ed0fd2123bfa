"""Items that are read to their end before a run begins, and may have none."""

import logging
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

WARN_SECONDS = 60.0
"""Seconds between warnings."""

T = TypeVar("T")

log = logging.getLogger("drawloom.data")


def warn_while_reading(items: Iterable[T], name: str) -> Iterator[T]:
    """Yield all items, and warn every minute that the run waits for their end; `name` is who yields them."""
    start = last = time.monotonic()
    for count, item in enumerate(items, 1):
        yield item
        if (now := time.monotonic()) - last >= WARN_SECONDS:
            last = now
            log.warning(
                "%s has yielded %d items in %d seconds, and the run begins after the last one; for data without "
                "an end, write a component with `next_step` for [data]: docs/data.md, Generated and streamed data",
                *(name, count, now - start),
            )
