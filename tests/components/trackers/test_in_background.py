"""Trackers that write in a thread of their own."""

import logging
import math
import threading
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import pytest

from drawloom.components.trackers.in_background import TrackerInBackground


@attrs.define(eq=False, kw_only=True)
class Notes(TrackerInBackground):
    """Notes what it is asked to write; `act` may hang or raise first."""

    called: ClassVar[str] = "Notes"
    act: Any = None
    noted: list[Any] = attrs.field(factory=list)

    def _prepare(self) -> None:
        self.noted.append("prepared")

    def _begin(self, step: int) -> None:
        self.noted.append(f"after {step}")

    def _write(self, step: int, numbers: Mapping[str, float]) -> None:
        if self.act:
            self.act()
        self.noted.append((step, dict(numbers)))

    def _end(self) -> None:
        self.noted.append("end")


NOTES: Any = Notes  # whose fields are inherited by a decorator of its own


@attrs.frozen
class Second:
    """A world group as rank 1 sees it."""

    rank: int = 1
    size: int = 2


def test_finite_values_are_written_in_order(one_rank: Any) -> None:
    """Values become floats; those that are none or not finite are left out; the end comes last."""
    tracker = NOTES(mesh=one_rank)
    tracker.open()
    tracker.rewind(3)
    tracker.track(4, {"loss": 1, "flag": True, "norm": math.inf, "none": None})
    tracker.close()
    assert tracker.noted == ["prepared", "after 3", (4, {"loss": 1.0, "flag": 1.0}), "end"]
    assert all(type(number) is float for number in tracker.noted[2][1].values())


def test_other_ranks_write_nothing(one_rank: Any) -> None:
    """Only rank 0 prepares and writes."""
    tracker = NOTES(mesh=attrs.evolve(one_rank, world=Second()))
    tracker.open()
    tracker.track(1, {"loss": 1.0})
    tracker.close()
    assert tracker.noted == []


def test_what_hangs_or_fails_neither_delays_nor_ends_a_run(one_rank: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One that hangs costs the time that the end waits, one that raises nothing; each is one warning."""
    forever = threading.Event()
    hanging = NOTES(mesh=one_rank, act=forever.wait, queue_size=2, timeout=0.1)
    failing = NOTES(mesh=one_rank, act=lambda: 1 // 0)
    begin = time.monotonic()
    with caplog.at_level(logging.WARNING, "drawloom.trackers"):
        for tracker in (hanging, failing):
            tracker.open()
            for step in range(1, 10):
                tracker.track(step, {"loss": 1.0})
            tracker.close()
    forever.set()
    assert time.monotonic() - begin < 5
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2 and "does not keep up" in messages[0] and "ZeroDivisionError" in messages[1]
