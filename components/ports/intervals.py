"""Points in time on a device, and the interval from one measured step to the next: the clock of all rates."""

import time
from collections.abc import Callable, Sequence

import attrs
import torch

MIN_SECONDS = 1e-9  # a coarse clock may return the same time twice

Mark = float | torch.cuda.Event
"""A point in time: seconds on the host's monotonic clock, or on a GPU an event in the current stream."""

Span = tuple[Mark, Mark]


def mark_time(device: torch.device, clock: Callable[[], float] = time.monotonic) -> Mark:
    """Return the present time of a device: on a GPU, when its queued work is finished. The host does not wait."""
    if device.type != "cuda":
        return clock()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def compute_seconds_between(start: Mark, end: Mark) -> float:
    """Return the seconds from one mark to another; waits until the GPU has reached the second."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    end.synchronize()  # type: ignore[union-attr]
    return float(start.elapsed_time(end)) / 1000  # type: ignore[union-attr, arg-type]


@attrs.frozen
class Interval:
    """
    Time between the measurements of two consecutive steps, after all ranks have reached both.

    The spans in `excluded`, such as evaluations and saving, are within the interval and count in no rate.
    """

    start: Mark
    end: Mark
    excluded: Sequence[Span] = ()

    @property
    def total_seconds(self) -> float:
        """The seconds from start to end."""
        return compute_seconds_between(self.start, self.end)

    @property
    def excluded_seconds(self) -> float:
        """The seconds in excluded spans."""
        return sum(compute_seconds_between(*span) for span in self.excluded)

    @property
    def training_seconds(self) -> float:
        """The seconds that count in rates, above 0."""
        return max(self.total_seconds - self.excluded_seconds, MIN_SECONDS)
