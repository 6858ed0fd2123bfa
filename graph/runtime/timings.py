"""How long each node took to build, open and close."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import attrs

Moment = Literal["build", "open", "close"]

MOMENTS: tuple[Moment, ...] = ("build", "open", "close")

LEAST = 0.001
"""Seconds from which on a node has a line of its own."""


@attrs.frozen
class Timing:
    """One thing that was done for a node; when it began by the monotonic clock, and how long it took, in seconds."""

    node: str
    moment: Moment
    start: float
    seconds: float


@contextmanager
def timed(spans: list[Timing], node: str, moment: Moment) -> Iterator[None]:
    """Measure what is done inside, also when it fails."""
    start = time.perf_counter()
    try:
        yield
    finally:
        spans.append(Timing(node, moment, start, time.perf_counter() - start))


def report(spans: Sequence[Timing]) -> str:
    """A table of nodes and moments in milliseconds, the slowest first; those that took next to nothing in one line."""
    totals: dict[str, dict[Moment, float]] = {}
    for span in spans:
        moments = totals.setdefault(span.node, dict.fromkeys(MOMENTS, 0.0))
        moments[span.moment] += span.seconds
    slowest = sorted(totals.items(), key=lambda item: -sum(item[1].values()))
    shown = [(f"[{name}]", times) for name, times in slowest if sum(times.values()) >= LEAST]
    others = [times for _, times in slowest if sum(times.values()) < LEAST]
    rest = {moment: sum(times[moment] for times in others) for moment in MOMENTS}
    shown += [(f"{len(others)} others", rest)] if others else []
    shown.append(("all", {moment: sum(times[moment] for times in totals.values()) for moment in MOMENTS}))
    width = max(len(name) for name, _ in shown)
    head = f"{'ms':{width}}{''.join(f'{moment:>10}' for moment in MOMENTS)}"
    return "\n".join([head, *(f"{name:{width}}{''.join(map(_milliseconds, times.values()))}" for name, times in shown)])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:10.1f}"
